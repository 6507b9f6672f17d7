"""The shapes a benchmark runs over: presets, sweeps and ragged mixes, parsed and checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UsageError

MAX_H, MAX_T, MAX_BS = 128, 64, 1024

SCATTERED = 1
CONTIGUOUS = 0


@dataclass(frozen=True)
class BenchShape:
    """One batch: prefix lengths, draft tokens a request, query heads, and how slots lie in the pool.

    `run_length` is the length of the runs in which slots lie together: 1 is scattered, 0 contiguous.
    """

    lengths: tuple[int, ...]
    T: int
    H: int
    run_length: int = SCATTERED

    @property
    def bs(self) -> int:
        return len(self.lengths)

    @property
    def slots(self) -> str:
        return slots_name(self.run_length)

    @property
    def length_label(self) -> str:
        """`65536`, `8x16384` or, for a ragged batch, `100000+7x1000`."""
        groups = [(length, len(list(same))) for length, same in itertools.groupby(self.lengths)]
        if len(groups) > 4:
            return f"{self.bs} mixed, {sum(self.lengths)} in all"
        return "+".join(str(length) if n == 1 else f"{n}x{length}" for length, n in groups)

    def __str__(self) -> str:
        return f"H {self.H} T {self.T} L {self.length_label} {self.slots}"

    def as_json(self) -> dict[str, Any]:
        return {"lengths": list(self.lengths), "T": self.T, "H": self.H, "run_length": self.run_length}

    @staticmethod
    def from_json(value: dict[str, Any]) -> BenchShape:
        return BenchShape(**{**value, "lengths": tuple(value["lengths"])})


PRESETS: dict[str, tuple[BenchShape, ...]] = {
    "targets": (
        *(BenchShape((L,), T=9, H=8) for L in (1024, 4096, 16384, 65536, 131072, 185000)),
        BenchShape((65536,), T=9, H=16),
        BenchShape((65536,), T=9, H=64),
        BenchShape((65536,), T=1, H=8),
        BenchShape((16384,) * 8, T=9, H=8),
    ),
    "quick": tuple(BenchShape((L,), T=9, H=8) for L in (1024, 16384, 65536, 185000)),
    "lengths": tuple(
        BenchShape((L,), T=9, H=8)
        for L in (
            0,
            64,
            256,
            1024,
            2048,
            4096,
            8192,
            16384,
            32768,
            65536,
            131072,
            185000,
        )
    ),
    "heads": tuple(BenchShape((16384,), T=9, H=H) for H in (1, 2, 4, 5, 8, 12, 16, 32, 64, 128)),
    "tokens": tuple(BenchShape((16384,), T=T, H=8) for T in (1, 2, 4, 8, 9, 16, 32, 64)),
    "batches": (
        *(BenchShape((16384,) * bs, T=9, H=8) for bs in (1, 2, 4, 8, 16, 32)),
        BenchShape((100_000, *(1000,) * 7), T=9, H=8),
    ),
    "slots": tuple(
        BenchShape((L,), T=9, H=8, run_length=run)
        for L in (16384, 65536, 131072)
        for run in (SCATTERED, 4, 16, 64, CONTIGUOUS)
    ),
}

PRESET_PEERS = {"quick": "none", "slots": "none"}
"""Peers of a preset where `--peers` is not given; all of them elsewhere."""


def sweep(H: Sequence[int], T: Sequence[int], bs: Sequence[int], L: Sequence[int]) -> list[BenchShape]:
    """Every combination, prefix length innermost."""
    return [BenchShape((length,) * n, T=t, H=h) for h in H for t in T for n in bs for length in L]


def with_slots(shapes: Sequence[BenchShape], run_lengths: Sequence[int]) -> list[BenchShape]:
    """Each shape once for each way of laying out slots."""
    return [BenchShape(s.lengths, s.T, s.H, run) for s in shapes for run in run_lengths]


def check_shape(shape: BenchShape) -> None:
    """Raise UsageError where a shape is outside what the kernels cover."""
    _within("H", shape.H, 1, MAX_H)
    _within("T", shape.T, 1, MAX_T)
    _within("bs", shape.bs, 1, MAX_BS)
    for length in shape.lengths:
        _within("L", length, 0, 1 << 24)


def int_list(text: str, name: str) -> list[int]:
    """`1,9,16` or `4k,16k,185000`; k is 1024. Raises UsageError naming the option."""
    return [_integer(item.strip(), name) for item in text.split(",")]


def slots_name(run_length: int) -> str:
    return {SCATTERED: "scattered", CONTIGUOUS: "contiguous"}.get(run_length, f"runs of {run_length}")


def run_length_of(text: str) -> int:
    """`scattered`, `contiguous` or a run length of 2 and more."""
    named = {"scattered": SCATTERED, "contiguous": CONTIGUOUS}
    if text in named:
        return named[text]
    if text.isdigit() and int(text) >= 2:
        return int(text)
    raise UsageError(f"--slots: {text!r} is neither scattered, contiguous nor a run length from 2 up")


def _integer(text: str, name: str) -> int:
    digits, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not digits.isdigit():
        raise UsageError(f"{name}: {text!r} is not a whole number (4096 and 4k are)")
    return int(digits) * factor


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name}: {value} is outside {low} to {high}")
