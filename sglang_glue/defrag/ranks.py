"""Tensor-parallel ranks relocate together or not at all.

Every rank decides from step counts and from state that SGLang keeps equal on all of them, so they should agree without
a word. An idle turn on one rank alone would part them for good, however; so before each such decision they compare
what they saw, over the group of CPUs by which SGLang hands requests out, and what differs ends relocation on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Ranks:
    """The ranks that must take the same steps; ``group`` is their process group, None for a rank on its own."""

    size: int = 1
    group: Any = None

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The integers of every rank, in rank order. Every rank must call this in the same step."""
        mine = torch.tensor(values, dtype=torch.int64)
        if self.size == 1:
            return [mine.tolist()]
        found = [torch.empty_like(mine) for _ in range(self.size)]
        torch.distributed.all_gather(found, mine, group=self.group)
        return [one.tolist() for one in found]


def ranks_of(scheduler: Any) -> Ranks:
    """The ranks of a scheduler's tensor-parallel group."""
    size = int(getattr(getattr(scheduler, "ps", None), "tp_size", 1))
    return Ranks(size, scheduler.tp_cpu_group) if size > 1 else Ranks()


def difference(names: Sequence[str], gathered: Sequence[Sequence[int]]) -> str | None:
    """The first of the named values that is not the same on every rank, with what each rank has; or None."""
    for name, values in zip(names, zip(*gathered, strict=True), strict=True):
        if len(set(values)) > 1:
            return f"ranks differ in {name}: {', '.join(map(str, values))}"
    return None
