"""The mover against NumPy, on chains, cycles and their overlaps."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda, types
from numpy.typing import NDArray

from sglang_glue.defrag.mover import (
    Pools,
    _gpu_mover,
    move_on_gpu,
    move_on_host,
    move_reference,
    pools_of_arrays,
    warm_up_gpu,
)
from sglang_glue.defrag.plan import Plan, make_plan

SLOTS = 40


def plan_of(moves: dict[int, int], size: int = SLOTS) -> Plan:
    src, dst = np.array(list(moves), np.int64), np.array(list(moves.values()), np.int64)
    free = np.setdiff1d(np.arange(1, size + 1), src)
    return make_plan(src, dst, free, size)


def layers(row_bytes: tuple[int, ...] = (1152, 32, 576)) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 256, (SLOTS + 1, 1, n), np.uint8) for n in row_bytes]


CASES = {
    "one move": {3: 9},
    "a chain": {3: 9, 9: 12, 12: 5},
    "a shift by one of a run": {i: i + 1 for i in range(4, 30)},
    "a shift down": {i: i - 1 for i in range(5, 30)},
    "a swap": {3: 9, 9: 3},
    "a cycle": {3: 9, 9: 12, 12: 3},
    "a rotation": {i: 4 + (i - 4 + 7) % 20 for i in range(4, 24)},
    "two chains and two cycles": {1: 2, 2: 1, 3: 4, 4: 5, 6: 7, 8: 9, 9: 10, 10: 8},
    "nothing": {},
}


@pytest.mark.parametrize("moves", CASES.values(), ids=CASES.keys())
def test_rows_arrive(moves: dict[int, int]) -> None:
    got, want, before = layers(), layers(), layers()
    plan = plan_of(moves)
    moved = move_on_host(pools_of_arrays(got), plan)
    for src, dst in moves.items():
        for layer, old in zip(got, before, strict=True):
            assert np.array_equal(layer[dst], old[src]), f"{src} -> {dst}"
    move_reference(want, plan)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)), "rows beside the plan changed"
    assert moved == len(moves) * (1152 + 32 + 576)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(1, 25)), st.integers(0, 24))
def test_any_partial_permutation(order: list[int], count: int) -> None:
    targets = np.random.default_rng(order[0]).permutation(24) + 1
    moves = {s: int(d) for s, d in zip(order[:count], targets, strict=False)}
    free_or_moving = set(moves) | (set(range(1, SLOTS + 1)) - set(order[:count]))
    assert set(moves.values()) <= free_or_moving
    got, want = layers((48,)), layers((48,))
    plan = plan_of(moves)
    move_on_host(pools_of_arrays(got), plan)
    move_reference(want, plan)
    assert np.array_equal(got[0], want[0])


def test_buffers_that_cannot_be_moved_are_named() -> None:
    with pytest.raises(ValueError, match="layer buffer 1: a row has 24 bytes, expected a multiple of 16"):
        pools_of_arrays([np.zeros((4, 16), np.uint8), np.zeros((4, 24), np.uint8)])
    with pytest.raises(ValueError, match="layer buffer 0: expected a writable C-contiguous"):
        pools_of_arrays([np.zeros((4, 32), np.uint8)[:, :16]])
    with pytest.raises(ValueError, match="plan names slot 9, the pools have 5 rows"):
        move_on_host(pools_of_arrays([np.zeros((5, 16), np.uint8)]), plan_of({3: 9}))
    with pytest.raises(ValueError, match="not aligned"):
        Pools(np.array([8]), np.array([16]), 4)


def test_slots_beyond_two_gigabytes_are_addressed() -> None:
    rows = 3_728_270
    buffer = np.zeros((rows + 2, 1152), np.uint8)  # pages are touched only where rows move
    buffer[rows] = 7
    plan = make_plan(np.array([rows]), np.array([rows + 1]), np.array([rows + 1]), rows + 1)
    move_on_host(pools_of_arrays([buffer]), plan)
    assert (buffer[rows + 1] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("moves", CASES.values(), ids=CASES.keys())
def test_rows_arrive_on_the_gpu(moves: dict[int, int]) -> None:
    want = layers()
    on_device = [cuda.to_device(layer) for layer in layers()]
    pools = Pools(
        np.array([d.device_ctypes_pointer.value for d in on_device], np.int64),
        np.array([1152, 32, 576], np.int64),
        SLOTS + 1,
    )
    plan = plan_of(moves)
    warm_up_gpu(pools, 0)
    move_on_gpu(pools, plan, stream=0)
    move_reference(want, plan)
    for got, expected in zip(on_device, want, strict=True):
        assert np.array_equal(got.copy_to_host(), expected)


@pytest.mark.gpu
def test_rows_of_torch_tensors_move_on_torch_s_stream() -> None:
    """As in a server: the launch is ordered with what torch does on its own stream before and after."""
    torch = pytest.importorskip("torch")
    rows, moves = 4096, {i: i + 1 for i in range(1, 4000)}
    plan = plan_of(moves, rows - 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        buffers = [torch.randint(0, 1000, (rows, 1, 576), device="cuda").to(torch.bfloat16) for _ in range(3)]
        want = [b.cpu() for b in buffers]
        pools = Pools(np.array([b.data_ptr() for b in buffers], np.int64), np.full(3, 1152, np.int64), rows)
        for buffer, old in zip(buffers, want, strict=True):
            buffer += 1
            old += 1
        assert move_on_gpu(pools, plan, torch.cuda.current_stream().cuda_stream) == len(plan) * 3 * 1152
        got = [(b + 1).cpu() for b in buffers]
    for after, old in zip(got, want, strict=True):
        moved = old.clone()
        moved[torch.from_numpy(plan.dst)] = old[torch.from_numpy(plan.src)]
        assert torch.equal(after, moved + 1)


def test_the_gpu_kernel_copies_wide_words_without_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(compute_capability=(12, 0))  # device functions ask for it; there may be no GPU here
    monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", lambda: device)
    table, flags = types.int64[::1], types.boolean[::1]
    kernel = _gpu_mover.__wrapped__()
    signature = types.void(table, table, table, table, flags)
    ptx, _ = cuda.compile(kernel.py_func, signature, cc=(12, 0), device=False, abi="numba")
    assert re.search(r"ld\S*\.v2\.[bu]64", ptx) and re.search(r"st\S*\.v2\.[bu]64", ptx)
    assert "bar.sync" not in ptx and "atom." not in ptx
