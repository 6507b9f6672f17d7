"""A fixed cost and a time a key tile, fitted to the lines of a `bench` result.

The plan gives every worker an equal share of the key tiles, so that a step takes about `fixed + per_tile * share`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import UsageError
from harness.report_load import BENCH, Record, ResultFile, load_results
from verify_numba.geometry import TILE
from verify_numba.plan import MIN_TILES, make_plan

H, T = 8, 9
"""The shape that the model covers, at bs = 1: 72 query rows, one row block of the cluster form."""
MIN_LINES = 3
"""Two numbers are fitted; a third line shows whether they mean anything."""


@dataclass(frozen=True)
class Line:
    """A measured step: prefix length, microseconds."""

    L: int
    us: float


@dataclass(frozen=True)
class Split:
    """How the key tiles of one request fall on the workers: `share` tiles each, for `busy` of them."""

    share: int
    busy: int


@dataclass(frozen=True)
class Fit:
    """`fixed_us` of a step, `tile_us` a key tile and worker, on a GPU with `sms` multiprocessors."""

    lines: tuple[Line, ...]
    sms: int
    fixed_us: float
    tile_us: float

    def us(self, L: int) -> float:
        """What the fit says for one of its own lines."""
        return self.fixed_us + self.tile_us * split(L, self.sms).share

    def error_percent(self, line: Line) -> float:
        return 100.0 * (self.us(line.L) / line.us - 1.0)


def split(L: int, sms: int) -> Split:
    """The shares of the plan for H = 8, T = 9, bs = 1 in the cluster form: two SMs a worker."""
    tiles = -(-L // TILE) + -(-T // TILE)
    share = max(-(-tiles // workers(sms)), MIN_TILES)
    return Split(share=share, busy=-(-tiles // share))


def workers(sms: int) -> int:
    """Workers of the cluster form; a block of it fills an SM."""
    return make_plan(max_bs=1, T=T, H=H, cc=(9, 0), sm_count=sms, form="cluster").workers


def load_bench(path: str) -> ResultFile:
    """A result of `bench`. Raises UsageError for a file that is none."""
    (file,) = load_results([path])
    if file.kind != BENCH:
        raise UsageError(f"{path}: schema is {file.kind!r}, expected {BENCH!r}")
    return file


def lines_of(file: ResultFile) -> tuple[Line, ...]:
    """The lines that the model covers: H = 8, T = 9, bs = 1, scattered slots, graph replay, the plan's own split."""
    return tuple(_line(file, record) for record in file.records if _covered(record))


def machine_of(file: ResultFile) -> dict[str, Any]:
    """What the result was measured on. Raises UsageError where the number of SMs is missing."""
    machine = file.result.get("machine")
    sms = machine.get("sms") if isinstance(machine, dict) else None
    if not isinstance(machine, dict) or not isinstance(sms, int) or sms < 2:
        raise UsageError(f"{file.path}: machine.sms is {sms!r}, expected the number of SMs of a GPU")
    return machine


def fit(lines: Sequence[Line], sms: int, where: str) -> Fit:
    """Least squares over `lines`. Raises UsageError, naming `where`, where there are too few of them."""
    shares = [split(line.L, sms).share for line in lines]
    if len(lines) < MIN_LINES or len(set(shares)) < 2:
        raise UsageError(
            f"{where}: {len(lines)} lines with H {H}, T {T}, bs 1, scattered, graph and the plan's own split, expected "
            f"at least {MIN_LINES} of different lengths"
        )
    design = np.stack([np.ones(len(shares)), np.array(shares, np.float64)], axis=1)
    (fixed, tile), *_ = np.linalg.lstsq(design, np.array([line.us for line in lines]), rcond=None)
    return Fit(tuple(lines), sms, float(fixed), float(tile))


def fit_source(file: ResultFile, where: str) -> Fit:
    """The fit that predictions rest on. Raises UsageError, naming `where`, for a result that cannot carry them."""
    found = fit(lines_of(file), machine_of(file)["sms"], where)
    if found.fixed_us <= 0 or found.tile_us <= 0:
        raise UsageError(
            f"{where}: fitted {found.fixed_us:.3g} us fixed and {found.tile_us:.3g} us a tile, expected both above 0"
        )
    return found


def _covered(record: Record) -> bool:
    return (
        (record["H"], record["T"], record["bs"]) == (H, T, 1)
        and (record["slots"], record["mode"], record["nsplit"]) == ("scattered", "graph", None)
        and record.get("form", "auto") in ("auto", "cluster")
    )


def _line(file: ResultFile, record: Record) -> Line:
    lengths, us = record["lengths"], record["us"]
    if not isinstance(lengths, list) or len(lengths) != 1 or not isinstance(lengths[0], int) or lengths[0] < 0:
        raise UsageError(f"{file.path}: lengths is {lengths!r}, expected one prefix length")
    if not isinstance(us, (int, float)) or not math.isfinite(us) or us <= 0:
        raise UsageError(f"{file.path}: us is {us!r} at L {lengths[0]}, expected microseconds above 0")
    return Line(lengths[0], float(us))
