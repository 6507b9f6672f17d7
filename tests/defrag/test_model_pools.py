"""The allocators: what they hand out, what a free costs, and what churn makes of them (kind 24)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_glue.defrag.model_pools import (
    MERGE_FRACTION,
    SortedAllocator,
    TokenAllocator,
    merge_due,
    window_start,
)
from sglang_glue.defrag.runs import Slots, count_runs

SIZE = 4096


def churn(allocator: TokenAllocator | SortedAllocator, steps: int, seed: int = 0) -> list[Slots]:
    """Random allocations of mixed sizes, freed in random order and in random pieces; returns what is held."""
    rng = np.random.default_rng(seed)
    held: list[Slots] = []
    for _ in range(steps):
        if held and rng.random() < 0.5:
            slots = held.pop(int(rng.integers(len(held))))
            cut = int(rng.integers(slots.size + 1))
            allocator.free(slots[:cut])
            if cut < slots.size:
                held.append(slots[cut:])
        else:
            slots = allocator.alloc(int(rng.integers(1, 65)))
            if slots is not None:
                held.append(slots)
    return held


@pytest.mark.parametrize(
    "make", [TokenAllocator, lambda n: TokenAllocator(n, need_sort=True), SortedAllocator]
)
def test_every_slot_is_free_or_held_once_after_churn(make) -> None:  # type: ignore[no-untyped-def]
    allocator = make(SIZE)
    held = churn(allocator, 3000)
    everything = np.sort(np.concatenate((allocator.all_free(), *held)))
    assert np.array_equal(everything, np.arange(1, SIZE + 1))
    assert allocator.available_size() == SIZE - sum(h.size for h in held)


def test_pending_slots_count_as_available_and_are_handed_out() -> None:
    allocator = SortedAllocator(100)
    slots = allocator.alloc(100)
    assert slots is not None and allocator.alloc(1) is None
    allocator.free(slots[40:60])
    assert allocator.available_size() == 20
    again = allocator.alloc(20)
    assert again is not None and again.tolist() == slots[40:60].tolist()
    assert allocator.available_size() == 0


def test_need_sort_does_not_change_what_alloc_returns_until_the_head_runs_out() -> None:
    """Kind 24: freed slots wait in the second list while scattered or used-up head slots are handed out."""
    plain, sorting = TokenAllocator(64), TokenAllocator(64, need_sort=True)
    for allocator in (plain, sorting):
        first = allocator.alloc(16)
        assert first is not None
        allocator.free(first[::2])
    a, b = plain.alloc(8), sorting.alloc(8)
    assert a is not None and b is not None and np.array_equal(a, b)


def test_churn_scatters_the_stock_allocator_and_not_the_sorted_one() -> None:
    """Kind 24: run length of fresh allocations, before and after churn."""
    lengths = {}
    for make in (TokenAllocator, SortedAllocator):
        allocator = make(SIZE)
        before = allocator.alloc(64)
        assert before is not None and count_runs(before) == 1
        allocator.free(before)
        for slots in churn(allocator, 4000):
            allocator.free(slots)
        after = [allocator.alloc(64) for _ in range(16)]
        lengths[make] = 64 * 16 / sum(count_runs(a) for a in after if a is not None)
    assert lengths[TokenAllocator] < 8
    assert lengths[SortedAllocator] == 64, "the free pool is whole again, so every allocation is one run"


@pytest.mark.parametrize("pool", [1_000, 1_000_000])
def test_a_free_costs_what_it_frees(pool: int) -> None:
    """Kind 24: slots copied by frees do not grow with the pool; merges copy, but rarely."""
    allocator = SortedAllocator(pool)
    slots = allocator.alloc(900)
    assert slots is not None
    head = allocator.free_pages
    for part in np.split(slots, 90):
        allocator.free(part)
    assert allocator.counters.copied_on_free == 900
    assert allocator.counters.frees == 90
    assert allocator.free_pages is head, "the sorted list was touched"


def test_sorting_is_amortised() -> None:
    """Slots sorted stay within a constant of slots freed, however many small frees there are."""
    allocator = SortedAllocator(200_000)
    freed = 0
    for _ in range(5000):
        slots = allocator.alloc(100)
        assert slots is not None
        allocator.free(slots)
        freed += 100
    assert allocator.counters.merges > 0
    assert allocator.counters.sorted_slots <= (MERGE_FRACTION + 2) * freed + 200_000


def test_merge_rule() -> None:
    assert not merge_due(0, 0, 10), "nothing to merge"
    assert merge_due(5, 9, 10), "the head does not suffice"
    assert not merge_due(1000, 100, 10)
    assert merge_due(1024, 100, 10)
    assert not merge_due(1024, 100_000, 10)
    assert merge_due(12_500, 100_000, 10)


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(1, 60), min_size=1, max_size=40), st.data())
def test_the_window_has_the_fewest_runs(slots: set[int], data: st.DataObject) -> None:
    free = np.array(sorted(slots), np.int64)
    need = data.draw(st.integers(1, free.size))
    at = window_start(free, need)
    best = min(count_runs(free[i : i + need]) for i in range(free.size - need + 1))
    assert count_runs(free[at : at + need]) == best


def test_the_window_prefers_a_hole_that_fits() -> None:
    free = np.array([*range(1, 11), *range(20, 24), *range(30, 40)], np.int64)
    allocator = SortedAllocator(40)
    allocator.replace_free(free)
    taken = allocator.alloc(4)
    assert taken is not None and taken.tolist() == [20, 21, 22, 23]
