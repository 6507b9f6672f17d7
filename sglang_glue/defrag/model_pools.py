"""NumPy models of SGLang's token allocator and request table.

``TokenAllocator`` follows ``TokenToKVPoolAllocator`` call for call: slots 1..size, slot 0 is the sink, allocation
takes the head of the free list, freed slots join the tail (or, with ``need_sort``, a second list that is merged and
sorted once the head runs out). ``SortedAllocator`` is tier 0, the model of ``sglang_allocator.SortedTokenAllocator``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglang_glue.defrag.runs import Slots

SEARCH_WINDOW = 1 << 16
"""Free slots that one allocation looks at for a contiguous window; bounds its cost on a pool of any size."""
MERGE_FRACTION = 8
"""Freed slots are merged into the sorted list once they number an eighth of it: O(log F) amortised a slot."""
MERGE_MIN = 1024
"""... and never more often than every so many freed slots."""

NONE: Slots = np.empty(0, np.int64)


class TokenAllocator:
    """The stock allocator. ``free_pages`` and ``release_pages`` are int64 arrays, as in SGLang."""

    def __init__(self, size: int, need_sort: bool = False) -> None:
        self.size = size
        self.need_sort = need_sort
        self.clear()

    def clear(self) -> None:
        """Forget all allocations."""
        self.free_pages: Slots = np.arange(1, self.size + 1, dtype=np.int64)
        self.release_pages: Slots = NONE

    def available_size(self) -> int:
        """Slots that could be handed out, those waiting to be merged included."""
        return len(self.free_pages) + len(self.release_pages)

    def alloc(self, need_size: int) -> Slots | None:
        """Hand out ``need_size`` slots, or None when there are not as many."""
        if self.need_sort and need_size > len(self.free_pages):
            self.merge_and_sort_free()
        if need_size > len(self.free_pages):
            return None
        taken = self.free_pages[:need_size]
        self.free_pages = self.free_pages[need_size:]
        return taken

    def free(self, slots: Slots) -> None:
        """Take slots back."""
        if slots.size == 0:
            return
        if self.need_sort:
            self.release_pages = np.concatenate((self.release_pages, slots))
        else:
            self.free_pages = np.concatenate((self.free_pages, slots))

    def merge_and_sort_free(self) -> None:
        """Join both lists and sort them."""
        if len(self.release_pages):
            self.free_pages = np.sort(np.concatenate((self.free_pages, self.release_pages)))
            self.release_pages = NONE

    def all_free(self) -> Slots:
        """Every free slot, in no particular order."""
        return np.concatenate((self.free_pages, self.release_pages))

    def replace_free(self, slots: Slots) -> None:
        """Install the free set that a relocation leaves behind."""
        self.free_pages, self.release_pages = slots, NONE


@dataclass
class SortCounters:
    """Calls of a sorted allocator: the proof that it is the one in use, and what its upkeep costs."""

    allocs: int = 0
    frees: int = 0
    merges: int = 0
    sorted_slots: int = 0
    copied_on_free: int = 0


def window_start(free_sorted: Slots, need: int) -> int:
    """Where in a sorted free list to take ``need`` slots so that they lie in the fewest runs.

    Among equals a window whose edges are those of runs, so that no run is cut, then the lowest.
    Looks at the first ``SEARCH_WINDOW + need`` entries.
    """
    seen = free_sorted[: SEARCH_WINDOW + need]
    broken = np.diff(seen) != 1
    before = np.concatenate(([0], np.cumsum(broken)))
    edge = np.concatenate(([True], broken, [True]))
    places = len(seen) - need + 1
    cost = 4 * (before[need - 1 :] - before[:places]) - edge[:places] - edge[need : need + places]
    return int(np.argmin(cost))


def merge_due(pending: int, sorted_count: int, need: int) -> bool:
    """Whether an allocation of ``need`` slots merges the freed slots first."""
    return pending > 0 and (need > sorted_count or pending >= max(MERGE_MIN, sorted_count // MERGE_FRACTION))


@dataclass
class SortedAllocator:
    """Tier 0: the free list is kept sorted and an allocation takes the window of fewest runs.

    ``free`` costs O(freed) whatever the pool holds: freed slots wait in a list and count as available.
    """

    size: int
    counters: SortCounters = field(default_factory=SortCounters)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all allocations."""
        self.free_pages: Slots = np.arange(1, self.size + 1, dtype=np.int64)
        self._pending: list[Slots] = []
        self._pending_count = 0

    def available_size(self) -> int:
        """Slots that could be handed out, those waiting to be merged included."""
        return len(self.free_pages) + self._pending_count

    def alloc(self, need_size: int) -> Slots | None:
        """Hand out ``need_size`` slots, in one run if the searched part of the free list has such a run."""
        if merge_due(self._pending_count, len(self.free_pages), need_size):
            self.merge_and_sort_free()
        if need_size > len(self.free_pages):
            return None
        self.counters.allocs += 1
        if need_size == 0:
            return NONE
        at = window_start(self.free_pages, need_size)
        taken = self.free_pages[at : at + need_size]
        self.free_pages = np.concatenate((self.free_pages[:at], self.free_pages[at + need_size :]))
        return taken

    def free(self, slots: Slots) -> None:
        """Take slots back, without touching the sorted list."""
        if slots.size == 0:
            return
        self.counters.frees += 1
        self.counters.copied_on_free += slots.size
        self._pending.append(slots.copy())
        self._pending_count += slots.size

    def merge_and_sort_free(self) -> None:
        """Merge the freed slots into the sorted list."""
        if self._pending:
            self.free_pages = np.sort(self.all_free())
            self.counters.merges += 1
            self.counters.sorted_slots += len(self.free_pages)
            self._pending, self._pending_count = [], 0

    def all_free(self) -> Slots:
        """Every free slot, in no particular order."""
        return np.concatenate((self.free_pages, *self._pending))

    def replace_free(self, slots: Slots) -> None:
        """Install the free set that a relocation leaves behind."""
        self.free_pages = np.sort(slots)
        self._pending, self._pending_count = [], 0


class ReqToTokenPool:
    """The request table: ``req_to_token`` [size + 1, max_context] int32; row 0 is reserved."""

    def __init__(self, size: int, max_context: int) -> None:
        self.req_to_token: NDArray[np.int32] = np.zeros((size + 1, max_context), np.int32)
        self.free_slots = list(range(1, size + 1))

    def alloc(self) -> int | None:
        """A free row, or None."""
        return self.free_slots.pop(0) if self.free_slots else None

    def free(self, row: int) -> None:
        """Give a row back."""
        self.free_slots.append(row)
