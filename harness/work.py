"""What a verify step must read and compute at least: the floors that a measured time is held against.

A latent row is shared by all heads and all draft tokens, so it has to leave memory once (`ROW_BYTES`). A query
row and a key meet in D_QK multiply-adds for the score and D_V for the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verify_numba.dims import D_QK, D_V, ROW_BYTES

FLOPS_PER_PAIR = 2 * (D_QK + D_V)
"""Floating-point operations for one query row and one key it sees: 2 * 1088."""


@dataclass(frozen=True)
class Work:
    """Bytes of latent rows and floating-point operations of one verify step."""

    bytes: int
    flops: int

    def gbps(self, us: float) -> float:
        """Latent bandwidth in GB/s (10^9 bytes) at `us` microseconds."""
        return self.bytes / us / 1e3

    def tflops(self, us: float) -> float:
        """Arithmetic rate in TFLOP/s at `us` microseconds."""
        return self.flops / us / 1e6


@dataclass(frozen=True)
class Ceilings:
    """What the machine was measured to reach: bytes per second read, bf16 operations per second."""

    read_bytes_per_s: float
    mma_flops_per_s: float


@dataclass(frozen=True)
class Floor:
    """Least time in microseconds that the bytes and the operations take at the measured ceilings."""

    bytes_us: float
    flops_us: float

    @property
    def us(self) -> float:
        return max(self.bytes_us, self.flops_us)

    @property
    def bound(self) -> str:
        """Which floor is the larger: "bytes" or "flops"."""
        return "bytes" if self.bytes_us >= self.flops_us else "flops"

    def percent(self, us: float) -> float:
        """Per cent of the larger floor reached at `us` microseconds; 100 is the floor itself."""
        return 100.0 * self.us / us


def count_work(lengths: Sequence[int], T: int, H: int, tail_cells: int) -> Work:
    """Work of one step: `lengths` are the prefixes, `tail_cells` the visible cells of all tail masks together."""
    rows = sum(lengths) + len(lengths) * T
    pairs = H * (sum(lengths) * T + tail_cells)
    return Work(bytes=rows * ROW_BYTES, flops=pairs * FLOPS_PER_PAIR)


def floor(work: Work, ceilings: Ceilings) -> Floor:
    """The two floors of `work` on a machine with these `ceilings`."""
    return Floor(
        bytes_us=work.bytes / ceilings.read_bytes_per_s * 1e6,
        flops_us=work.flops / ceilings.mma_flops_per_s * 1e6,
    )
