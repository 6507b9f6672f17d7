"""Tier 0 on SGLang's own allocator: the torch form of ``model_pools.SortedAllocator``.

No call synchronises the device: where a window begins stays a tensor, and only sizes are known to the host.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from sglang_glue.defrag.model_pools import SEARCH_WINDOW, SortCounters, merge_due
from sglang_glue.defrag.unsupported import Unsupported, type_name

STOCK = "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator"


def window_start(free_sorted: torch.Tensor, need: int) -> torch.Tensor:
    """``model_pools.window_start`` on the device: a 0-d int64 tensor. Costs are made distinct, so that every device
    breaks ties the same way."""
    seen = free_sorted[: SEARCH_WINDOW + need]
    broken = (torch.diff(seen) != 1).to(torch.int64)
    zero, one = broken.new_zeros(1), broken.new_ones(1)
    before = torch.cat((zero, torch.cumsum(broken, 0)))
    edge = torch.cat((one, broken, one))
    places = len(seen) - need + 1
    cost = 4 * (before[need - 1 :] - before[:places]) - edge[:places] - edge[need : need + places]
    order = torch.arange(places, device=seen.device)
    return torch.argmin((cost + 2) * places + order)


@cache
def sorted_allocator_class() -> Any:
    """The subclass of ``TokenToKVPoolAllocator`` that keeps its free list sorted."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    class SortedTokenAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
        """Hands out windows of few runs; frees are kept aside and merged in when they are many or needed."""

        free_pages: torch.Tensor
        kdtree_counters: SortCounters
        _pending: list[torch.Tensor]
        _pending_count: int

        @property
        def release_pages(self) -> torch.Tensor:
            """The freed slots that wait to be merged, for SGLang's own leak checks."""
            return torch.cat(self._pending) if self._pending else self.free_pages[:0]

        @release_pages.setter
        def release_pages(self, slots: torch.Tensor | None) -> None:
            self._pending = [] if slots is None or slots.numel() == 0 else [slots]
            self._pending_count = sum(p.numel() for p in self._pending)

        def available_size(self) -> int:
            return len(self.free_pages) + self._pending_count

        def alloc(self, need_size: int) -> torch.Tensor | None:
            if merge_due(self._pending_count, len(self.free_pages), need_size):
                self.merge_and_sort_free()
            if need_size > len(self.free_pages):
                return None
            self.kdtree_counters.allocs += 1
            if need_size == 0:
                return self.free_pages[:0]
            free, left = self.free_pages, len(self.free_pages) - need_size
            at = window_start(free, need_size)
            index = torch.arange(max(need_size, left), device=free.device)
            taken = free[index[:need_size] + at]
            rest = index[:left]
            self.free_pages = free[rest + need_size * (rest >= at)]
            return taken

        def free(self, free_index: torch.Tensor) -> None:
            if free_index.numel() == 0:
                return
            if self._collecting():
                super().free(free_index)
                return
            self.kdtree_counters.frees += 1
            self.kdtree_counters.copied_on_free += free_index.numel()
            self._pending.append(
                free_index.to(torch.int64, copy=True)
            )  # often a view of a row that gets reused
            self._pending_count += free_index.numel()

        def merge_and_sort_free(self) -> None:
            if self._pending:
                self.free_pages = torch.sort(torch.cat((self.free_pages, *self._pending))).values
                self.kdtree_counters.merges += 1
                self.kdtree_counters.sorted_slots += len(self.free_pages)
                self._pending, self._pending_count = [], 0

        def _collecting(self) -> bool:
            """Whether frees are being grouped (SGLang's ``free_group_begin``)."""
            immediate = getattr(
                self, "is_not_in_free_group", None
            )  # 0.5.17; later releases use the list alone
            return self.free_group is not None if immediate is None else not immediate

    return SortedTokenAllocator


def activate_sorted(allocator: Any) -> SortCounters:
    """Turn a stock allocator into a sorted one, in place; returns its call counters.

    Raises Unsupported, naming the type, for anything but SGLang's own token allocator with page size 1.
    """
    if type_name(allocator) != STOCK:
        raise Unsupported(f"allocator {type_name(allocator)}: sorted allocation supports {STOCK} only")
    if allocator.page_size != 1:
        raise Unsupported(f"page size {allocator.page_size}: sorted allocation supports 1 only")
    waiting = allocator.__dict__.pop("release_pages", None)
    allocator.__class__ = sorted_allocator_class()
    allocator.kdtree_counters = SortCounters()
    allocator.release_pages = waiting
    allocator.free_pages = torch.sort(allocator.free_pages).values
    return allocator.kdtree_counters


def replace_free(allocator: Any, slots: torch.Tensor) -> None:
    """Install the free set (ascending) that a relocation leaves behind, in either kind of allocator."""
    allocator.free_pages = slots
    allocator.release_pages = slots[:0]
