"""Index loads, the division of work, and the copies into a stage."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from tests.lockstep.support import BY_NAME, Array, inside
from verify_numba.dims import D_QK, D_V
from verify_numba.geometry import TILE, Geometry
from verify_numba.kernels.work import KV_WIDE, PREFIX, QO_WIDE, SLOTS_WIDE, TAIL, Batch, Share, make_walk
from verify_numba.lockstep import GlobalMemory, MemoryFault
from verify_numba.lockstep.copy_ops import load_slots
from verify_numba.lockstep.machine import current
from verify_numba.lockstep.work_ops import first_share, i32, load_index, request_span

ANY_FORM = BY_NAME["single8"]
lengths = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), min_size=1, max_size=6)


def make_batch(
    memory: GlobalMemory,
    drafts: list[int],
    prefix: list[int],
    *,
    parts: int = PREFIX | TAIL,
    min_tiles: int = 1,
) -> Batch:
    qo, kv = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (drafts, prefix))
    addresses = memory.add("qo_indptr", qo), memory.add("kv_indptr", kv)
    return Batch(len(drafts), 8, parts, 0, 0, min_tiles, *addresses, 0, 0, 0)


def test_i32_keeps_what_fits_and_refuses_the_rest() -> None:
    assert [i32(value) for value in (-(2**31), 0, 2**31 - 1)] == [-(2**31), 0, 2**31 - 1]
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(OverflowError, match="does not fit int32"):
            i32(value)


@pytest.mark.parametrize(("dtype", "wide"), [(np.int32, 0), (np.int64, 8)])
def test_load_index_reads_either_width(dtype: type, wide: int) -> None:
    array: Array = np.array([3, -1, 2**31 - 1], dtype)
    memory = GlobalMemory()
    address = memory.add("index", array)

    def body(ops: SimpleNamespace) -> None:
        assert [load_index(address, i, wide) for i in range(3)] == array.tolist()
        load_index(address, 3, wide)

    with pytest.raises(MemoryFault, match="'index' at byte"):
        inside(ANY_FORM, body, memory=memory)


@given(lengths, st.sampled_from([PREFIX, TAIL, PREFIX | TAIL]), st.integers(1, 9), st.integers(1, 5))
def test_shares_divide_the_line_of_tiles(
    requests: list[tuple[int, int]], parts: int, workers: int, min_tiles: int
) -> None:
    prefix, drafts = [list(x) for x in zip(*requests, strict=True)]
    memory = GlobalMemory()
    batch = make_batch(memory, drafts, prefix, parts=parts, min_tiles=min_tiles)

    def body(ops: SimpleNamespace) -> None:
        request_of, _, _ = make_walk(ops)
        tiles = [request_of(batch, b).tiles for b in range(batch.bs)]
        line = [(b, t) for b, count in enumerate(tiles) for t in range(count)]
        shares = [first_share(batch, worker, workers) for worker in range(workers)]
        assert [at for share in shares for at in range(share.begin, share.end)] == list(range(len(line)))
        sizes = [share.end - share.begin for share in shares]
        assert max(sizes) <= max(min_tiles, -(-len(line) // workers))
        owners = [worker for worker, share in enumerate(shares) for _ in range(share.begin, share.end)]
        for share in shares:
            if share.begin < share.end:
                b, tile = line[share.begin]
                assert (share.b, share.start) == (b, share.begin - tile)
        for b in range(batch.bs):
            mine = sorted({owner for owner, (of, _) in zip(owners, line, strict=True) if of == b})
            first, count = request_span(batch, b, workers)
            assert count == len(mine)
            assert not mine or mine == list(range(first, first + count))

    inside(ANY_FORM, body, memory=memory)


def test_an_empty_batch_has_no_share() -> None:
    memory = GlobalMemory()
    batch = make_batch(memory, [], [])

    def body(ops: SimpleNamespace) -> None:
        assert first_share(batch, 0, 2) == Share(0, 0, 0, 0)

    inside(ANY_FORM, body, memory=memory)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_load_slots_repeats_the_last_token_and_reads_nothing_else(dtype: type) -> None:
    L, T = 20, 18
    slots: Array = np.arange(100, 105 + L).astype(dtype)  # the request before this one has five entries
    memory = GlobalMemory()
    qo, kv = np.array([0, 3, 3 + T]), np.array([0, 5, 5 + L])
    widths = QO_WIDE | KV_WIDE | (SLOTS_WIDE if dtype is np.int64 else 0)
    at_qo, at_kv, at_slots = memory.add("qo", qo), memory.add("kv", kv), memory.add("slots", slots)
    batch = Batch(2, 8, PREFIX | TAIL, 0, widths, 1, at_qo, at_kv, at_slots, 0, 0)
    pool = [*range(105, 105 + L), *[104 + L] * 12]
    tail = [*range(3, 3 + T), *[2 + T] * 14]
    rows = np.array([*pool, *tail]).reshape(4, TILE)

    def body(ops: SimpleNamespace) -> None:
        request = make_walk(ops)[0](batch, 1)
        assert (request.prefix_tiles, request.tiles) == (2, 4)
        for first in range(6):
            for last in range(1, 5):
                found = load_slots(batch, request, first, last).reshape(2, TILE)
                expected = [rows[min(first + half, last - 1)] for half in range(2)]
                assert np.array_equal(found, expected)

    inside(ANY_FORM, body, memory=memory)


def stage_of(g: Geometry) -> Array:
    """[16, columns] bf16 of stage 1."""
    shape = (TILE, g.value_columns + g.rope_columns)
    view = current().block.shared.view(g.shared.stage + g.stage_bytes, np.uint16, shape, g.row_stride)
    return view.view(ml_dtypes.bfloat16)


def test_copy_rows_brings_each_block_its_columns(form: Geometry) -> None:
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((50, D_QK)).astype(ml_dtypes.bfloat16)
    slots = rng.permutation(50)[:32]
    memory = GlobalMemory()
    address = memory.add("kv_pool", pool)

    def body(ops: SimpleNamespace) -> None:
        g, rank = form, current().block.x
        current().block.init_mbarrier(g.shared.full + 8, 32, "full[1]")
        ops.copy_rows(
            g.shared.stage + g.stage_bytes, g.shared.full + 8, address, pool.strides[0], slots, 1, rank
        )  # fmt: skip
        ops.wait(g.shared.full + 8, 0)
        rows = pool[slots[16:]]
        value = rows[:, rank * g.value_columns : (rank + 1) * g.value_columns]
        rope = rows[:, D_V + rank * g.rope_columns : D_V + (rank + 1) * g.rope_columns]
        expected = np.concatenate([value, rope], axis=1)
        assert np.array_equal(stage_of(g), expected)

    inside(form, body, memory=memory)


@pytest.mark.parametrize("slot", [50, -1])
def test_a_slot_outside_the_pool_names_pool_and_warp(slot: int) -> None:
    pool = np.zeros((50, D_QK), ml_dtypes.bfloat16)
    slots = np.arange(32)
    slots[5] = slot
    memory = GlobalMemory()
    address = memory.add("kv_pool", pool)

    def body(ops: SimpleNamespace) -> None:
        current().block.init_mbarrier(ANY_FORM.shared.full, 32, "full[0]")
        ops.copy_rows(0, ANY_FORM.shared.full, address, 1152, slots, 0, 0)

    with pytest.raises(MemoryFault, match=r"warp 0 of block \(0, 0\): .* 'kv_pool' at byte"):
        inside(ANY_FORM, body, memory=memory)


def test_copied_rows_must_be_aligned() -> None:
    pool = np.zeros((50, D_QK + 4), ml_dtypes.bfloat16)
    memory = GlobalMemory()
    address = memory.add("kv_pool", pool)

    def body(ops: SimpleNamespace) -> None:
        current().block.init_mbarrier(ANY_FORM.shared.full, 32, "full[0]")
        ops.copy_rows(0, ANY_FORM.shared.full, address, pool.strides[0], np.arange(32), 0, 0)

    with pytest.raises(MemoryFault, match="not a multiple of 16 bytes"):
        inside(ANY_FORM, body, memory=memory)
