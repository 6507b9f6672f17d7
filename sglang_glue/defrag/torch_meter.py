"""The fragmentation metric on the device, without waiting for it.

The counts are computed where the slots are and copied to pinned memory behind an event; whoever wants them reads
them later. Equal to ``runs.summarise`` in all it gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from sglang_glue.defrag.runs import BUCKETS, EMPTY, RunStats


def measure(block: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Run statistics of slot lists ``block`` [R, W], of which the first ``lengths`` [R] of each row count.

    Returns int64 [2 + 2 * len(BUCKETS)]: runs, the longest run, runs by bucket, tokens by bucket. Launches a fixed
    number of operations and reads nothing back.
    """
    wide = block.to(torch.int64)
    at = torch.arange(wide.shape[1], device=wide.device)
    valid = at[None] < lengths[:, None].to(torch.int64)
    starts = torch.ones_like(valid)
    starts[:, 1:] = wide[:, 1:] != wide[:, :-1] + 1
    ends = torch.ones_like(valid)
    ends[:, :-1] = starts[:, 1:] | ~valid[:, 1:]
    ends &= valid
    begun = torch.cummax(torch.where(starts, at[None], 0), 1).values
    run = torch.where(ends, at[None] - begun + 1, 0).flatten()
    bucket = (torch.bucketize(run, _bounds(wide.device), right=True) - 1).clamp_(min=0)
    counts = torch.zeros(len(BUCKETS), dtype=torch.int64, device=wide.device)
    tokens = torch.zeros_like(counts)
    counts.scatter_add_(0, bucket, ends.flatten().to(torch.int64))
    tokens.scatter_add_(0, bucket, run)
    return torch.cat((counts.sum()[None], run.amax()[None], counts, tokens))


@cache
def _bounds(device: torch.device) -> torch.Tensor:
    return torch.tensor(BUCKETS, device=device)


def upload(values: list[int], device: torch.device) -> torch.Tensor:
    """Integers on the device, without waiting: a plain copy would wait for all that its stream has been given."""
    pinned = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


@dataclass
class Reading:
    """A measurement under way."""

    counts: torch.Tensor
    event: torch.cuda.Event | None

    def ready(self) -> bool:
        """Whether the counts have arrived; never waits."""
        return self.event is None or self.event.query()

    def stats(self) -> RunStats:
        """The statistics; waits for the copy if it is still under way. ``typical`` is its bucket's lower bound."""
        if self.event is not None:
            self.event.synchronize()
        values = self.counts.tolist()
        runs, longest = values[:2]
        counts, tokens = values[2 : 2 + len(BUCKETS)], values[2 + len(BUCKETS) :]
        total = sum(tokens)
        if total == 0:
            return EMPTY
        return RunStats(total, runs, total / runs, _median_bucket(tokens), longest, tuple(counts))


def _median_bucket(tokens: list[int]) -> int:
    half, covered = (sum(tokens) + 1) // 2, 0
    for bound, count in zip(BUCKETS, tokens, strict=True):
        covered += count
        if covered >= half:
            return bound
    return BUCKETS[-1]


def start(block: torch.Tensor, lengths: torch.Tensor) -> Reading:
    """Begin a measurement on the current stream."""
    if block.numel() == 0:
        return Reading(torch.zeros(2 + 2 * len(BUCKETS), dtype=torch.int64), None)
    counts = measure(block, lengths)
    if counts.device.type != "cuda":
        return Reading(counts, None)
    pinned = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    pinned.copy_(counts, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(counts.device))
    return Reading(pinned, event)
