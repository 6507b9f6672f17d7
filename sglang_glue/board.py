"""Counters that live on the device and can be read at any time without a CUDA call.

Everything is one flat float64 tensor, so that one small asynchronous copy into pinned host memory, enqueued behind
the last layer of a step and captured into the graph with it, publishes all of it. The reader looks at host memory:
it adds no synchronisation, and it cannot disturb a graph capture in another thread.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

RING = 64
"""Mismatches kept, the newest ones."""


class Tag(enum.IntEnum):
    """How a call ran: launched by Python, or as part of a CUDA graph."""

    EAGER = 0
    GRAPH = 1


STATS = (
    "calls",  # calls with a row to compare
    "rows",  # rows (draft token of a request that is not padding) compared
    "mismatches",  # calls whose relative norm reached the threshold, or with a non-finite row of ours
    "sq_diff",
    "sq_triton",
    "nan_ours",  # rows with a value that is not finite
    "nan_triton",
    "max_abs",
    "max_rel",  # largest relative norm of one call
    "worst_prefix",  # prefix length of the request with the largest difference, in the call of max_rel
    "worst_bs",
)
"""Columns of the statistics, one row a layer and tag."""

MISMATCH = ("tag", "layer", "bs", "prefix", "rel", "max_abs")
"""Columns of one remembered mismatch."""


@dataclass(frozen=True)
class Reading:
    """What the host sees of a board: steps [2], stats [2, layers, len(STATS)], ring [n, len(MISMATCH)]."""

    steps: np.ndarray[Any, np.dtype[np.float64]]
    stats: np.ndarray[Any, np.dtype[np.float64]]
    ring: np.ndarray[Any, np.dtype[np.float64]]


class Board:
    """Device counters of one backend with `layers` layers, and their pinned mirror."""

    def __init__(self, layers: int, device: str) -> None:
        shapes = ((len(Tag),), (len(Tag), layers, len(STATS)), (RING, len(MISMATCH)))
        sizes = [int(np.prod(shape)) for shape in shapes]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        parts = self._flat.split(sizes)
        self.steps, self.stats, self.ring = (p.view(s) for p, s in zip(parts, shapes, strict=True))
        self._mirror = torch.zeros(sum(sizes), dtype=torch.float64, pin_memory=self._flat.is_cuda)
        mirrored = self._mirror.split(sizes)
        self._seen = [p.view(s).numpy() for p, s in zip(mirrored, shapes, strict=True)]

    def count_step(self, tag: Tag) -> None:
        """Enqueue: one more verify step ran."""
        self.steps[tag].add_(1)

    def publish(self) -> None:
        """Enqueue the copy to host memory; `read` sees it when the stream has got there."""
        self._mirror.copy_(self._flat, non_blocking=True)

    def read(self) -> Reading:
        """The last published state; makes no CUDA call."""
        steps, stats, ring = (part.copy() for part in self._seen)
        kept = min(int(stats[..., STATS.index("mismatches")].sum()), RING)
        return Reading(steps, stats, ring[:kept])
