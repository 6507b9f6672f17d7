"""How scattered are slots? Run lengths of slot lists.

A *run* is a maximal stretch of a slot list in which each slot is its predecessor plus one: what one copy can read
at once. The measure of a list is its mean run length, tokens divided by runs; 1.0 is fully scattered.
Pure NumPy, one pass over the list, no sort for request rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]

BUCKETS = tuple(1 << i for i in range(16))
"""Lower bounds of the histogram of run lengths: 1, 2, 4, ... 32768; the last bucket is open."""


@dataclass(frozen=True)
class RunStats:
    """The distribution of run lengths of one or several slot lists.

    ``typical`` is the run length in which the median *token* lies; it is not dragged down by a few strays, as the
    mean is. ``histogram[i]`` counts the runs of length ``BUCKETS[i]`` up to the next bucket.
    """

    tokens: int
    runs: int
    mean: float
    typical: int
    longest: int
    histogram: tuple[int, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


EMPTY = RunStats(0, 0, 0.0, 0, 0, (0,) * len(BUCKETS))


def run_lengths(slots: Slots) -> NDArray[np.int64]:
    """Lengths of the runs of ``slots`` [L], in order; their sum is L. An empty list has no runs."""
    if slots.size == 0:
        return np.empty(0, np.int64)
    starts = np.flatnonzero(np.diff(slots) != 1) + 1
    edges = np.concatenate(([0], starts, [slots.size]))
    return np.diff(edges).astype(np.int64)


def runs_of_set(slots: Slots) -> tuple[Slots, NDArray[np.int64]]:
    """First slots and lengths of the runs of a *set* of slots (sorted here), ascending by slot."""
    ordered = np.sort(slots)
    lengths = run_lengths(ordered)
    firsts = ordered[np.cumsum(lengths) - lengths] if lengths.size else np.empty(0, np.int64)
    return firsts, lengths


def count_runs(slots: Slots) -> int:
    """Number of runs of ``slots`` [L]: the cheap half of the metric."""
    return 0 if slots.size == 0 else int(np.count_nonzero(np.diff(slots) != 1)) + 1


def summarise(lengths: NDArray[np.int64]) -> RunStats:
    """Statistics of a list of run lengths."""
    if lengths.size == 0:
        return EMPTY
    ordered = np.sort(lengths)
    covered = np.cumsum(ordered)
    tokens = int(covered[-1])
    typical = int(ordered[np.searchsorted(covered, (tokens + 1) // 2)])
    bucket = np.searchsorted(BUCKETS, ordered, side="right") - 1
    counts = np.bincount(bucket, minlength=len(BUCKETS))
    return RunStats(
        tokens=tokens,
        runs=int(ordered.size),
        mean=tokens / ordered.size,
        typical=typical,
        longest=int(ordered[-1]),
        histogram=tuple(int(c) for c in counts),
    )


def row_stats(rows: Iterable[Slots]) -> RunStats:
    """Run statistics over the slot lists of several requests; a run never spans two requests."""
    lengths = [run_lengths(row) for row in rows]
    return summarise(np.concatenate(lengths)) if lengths else EMPTY


def free_stats(free: Slots) -> RunStats:
    """Run statistics of the free slots as a set: the contiguous room that an allocation could find."""
    return summarise(runs_of_set(free)[1])


def mean_run(rows: Iterable[Slots]) -> float:
    """Mean run length over the rows, 0.0 without tokens; the planner's trigger."""
    tokens = runs = 0
    for row in rows:
        tokens += row.size
        runs += count_runs(row)
    return tokens / runs if runs else 0.0
