"""The models equal SGLang's classes, call for call, and the sorted allocator its model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_glue.defrag.model_pools import SortedAllocator, TokenAllocator
from tests.defrag.pools import server
from tests.defrag.real import needs_sglang, real_server

pytestmark = needs_sglang


def stock(size: int, need_sort: bool = False) -> Any:
    import torch
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    return TokenToKVPoolAllocator(size, torch.bfloat16, "cpu", None, need_sort)


def sorted_real(size: int) -> Any:
    from sglang_glue.defrag.sglang_allocator import activate_sorted

    allocator = stock(size)
    activate_sorted(allocator)
    return allocator


PAIRS = {
    "stock": (lambda n: TokenAllocator(n), lambda n: stock(n)),
    "need_sort": (lambda n: TokenAllocator(n, need_sort=True), lambda n: stock(n, need_sort=True)),
    "sorted": (lambda n: SortedAllocator(n), lambda n: sorted_real(n)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_allocators_hand_out_the_same_slots(pair: tuple[Any, Any], seed: int) -> None:
    import torch

    model, real = (make(3000) for make in pair)
    rng = np.random.default_rng(seed)
    held: list[np.ndarray[Any, Any]] = []
    for _ in range(1500):
        if held and rng.random() < 0.5:
            slots = held.pop(int(rng.integers(len(held))))
            cut = int(rng.integers(slots.size + 1))
            model.free(slots[:cut])
            real.free(torch.from_numpy(slots[:cut].copy()))
            held += [slots[cut:]] if cut < slots.size else []
        else:
            n = int(rng.integers(0, 90))
            got, want = real.alloc(n), model.alloc(n)
            assert (got is None) == (want is None)
            if want is not None:
                assert got.tolist() == want.tolist() and got.dtype == torch.int64
                held.append(want)
        assert real.available_size() == model.available_size()
    everything = torch.cat((real.free_pages, real.release_pages)).tolist()
    assert sorted(everything) == sorted(model.all_free().tolist())


@pytest.mark.parametrize("tier", ["off", "sort", "relocate"])
def test_a_simulated_server_goes_the_same_way_on_both(tier: str) -> None:
    """Allocation, radix tree, eviction and relocation: equal ownership, slot by slot, all along."""
    model = server(tier, 6)
    real, _ = real_server(tier, 6)
    for step in range(250):
        model.step()
        real.step()
        if step % 10 == 0:
            both = [s.backend.snapshot([j.req for j in s.live]) for s in (model, real)]
            assert both[0].digest() == both[1].digest(), f"step {step}"
            real.check()
    for totals in (model.totals, real.totals):
        totals.planning_seconds = totals.longest_planning_seconds = 0.0
    assert model.totals == real.totals
    assert model.totals.finished > 10


def test_the_sorted_allocator_counts_its_calls() -> None:
    allocator = sorted_real(100)
    slots = allocator.alloc(10)
    allocator.free(slots)
    counters = allocator.kdtree_counters
    assert (counters.allocs, counters.frees, counters.copied_on_free) == (1, 1, 10)


def test_frees_in_a_group_and_clear() -> None:
    allocator = sorted_real(50)
    slots = allocator.alloc(20)
    allocator.free_group_begin()
    allocator.free(slots[:5])
    allocator.free(slots[10:])
    assert allocator.available_size() == 30
    allocator.free_group_end()
    assert allocator.available_size() == 45 and len(allocator.release_pages) == 15
    allocator.clear()
    assert allocator.available_size() == 50 and len(allocator.release_pages) == 0


def test_a_freed_view_may_be_overwritten() -> None:
    """Freed slots are often a view of a request's row, which the next request writes."""
    import torch

    allocator = sorted_real(10)
    row = allocator.alloc(10).to(torch.int32)
    allocator.free(row[2:5])
    row[:] = 7
    assert allocator.alloc(3).tolist() == [3, 4, 5]


def test_an_allocator_in_use_can_be_taken_over() -> None:
    import torch

    from sglang_glue.defrag.sglang_allocator import activate_sorted

    allocator = stock(10)
    held = allocator.alloc(6)
    allocator.free(held[[4, 1]])
    activate_sorted(allocator)
    assert allocator.available_size() == 6
    assert allocator.free_pages.tolist() == [2, 5, 7, 8, 9, 10]
    assert isinstance(allocator.alloc(6), torch.Tensor)


def test_other_allocators_are_refused_by_name() -> None:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    from sglang_glue.defrag.sglang_allocator import activate_sorted
    from sglang_glue.defrag.unsupported import Unsupported

    paged = object.__new__(PagedTokenToKVPoolAllocator)
    with pytest.raises(Unsupported, match="PagedTokenToKVPoolAllocator: sorted allocation supports"):
        activate_sorted(paged)
    with pytest.raises(Unsupported, match="SortedTokenAllocator"):
        activate_sorted(sorted_real(10))


@pytest.mark.gpu
def test_sorted_allocation_never_waits_for_the_device() -> None:
    import torch
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    from sglang_glue.defrag.sglang_allocator import activate_sorted

    allocator = TokenToKVPoolAllocator(10_000, torch.bfloat16, "cuda", None, need_sort=False)
    activate_sorted(allocator)
    model = SortedAllocator(10_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = []
        for n in (300, 40, 2000, 7, 64):
            got.append(allocator.alloc(n))
            allocator.free(got[-1][::3])
        got.append(allocator.alloc(9000))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for n, slots in zip((300, 40, 2000, 7, 64), got, strict=False):
        want = model.alloc(n)
        assert want is not None and slots.tolist() == want.tolist()
        model.free(want[::3])
    assert got[-1] is None or len(got[-1]) == 9000
