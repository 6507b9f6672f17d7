"""Each operation on a tile against plain NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from oracle.attention import merge as oracle_merge
from tests.lockstep.support import BY_NAME, FORMS, Array, inside
from tests.trees import tree_mask
from verify_numba.dims import D_QK, D_V
from verify_numba.geometry import TILE, Geometry
from verify_numba.kernels.work import CHAIN, QLEN_ONLY
from verify_numba.lockstep import GlobalMemory
from verify_numba.lockstep.bf16 import narrow, widen
from verify_numba.lockstep.machine import current
from verify_numba.lockstep.merge_ops import combine, store_merged
from verify_numba.lockstep.score_ops import active_tiles, keep_first, keep_visible
from verify_numba.lockstep.softmax_ops import exceeds, exponents, grow, rescale, store_lse
from verify_numba.lockstep.value_ops import pack_partial, unpack_partial

BF16 = ml_dtypes.bfloat16
LOWEST = np.finfo(np.float32).min
ODD = BY_NAME["cluster72"]
"""Its last score warp has one n8 tile, the others two."""


@pytest.fixture(params=FORMS, ids=lambda g: g.name)
def form(request: pytest.FixtureRequest) -> Geometry:
    return request.param


def floats(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def put(offset: int, values: Array, stride: int | None = None) -> None:
    """Writes to the block's shared memory."""
    current().block.shared.view(offset, values.dtype, values.shape, stride)[:] = values


def put_stage(g: Geometry, rows: Array) -> None:
    put(g.shared.stage, rows.astype(BF16).view(np.uint16), g.row_stride)


def test_bf16_bits_there_and_back() -> None:
    bits = np.arange(1 << 16).astype(np.uint16)
    with np.errstate(invalid="ignore"):
        back = narrow(widen(bits))
    number = ~np.isnan(widen(bits))
    assert np.array_equal(back[number], bits[number])
    assert np.isnan(widen(back[~number])).all()
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    assert widen(narrow(ties)).tolist() == [1, 1 + 2**-6]


class TestQueriesAndScores:
    def test_load_q_takes_the_blocks_columns_of_its_rows(self, form: Geometry) -> None:
        H, n0, T = 5, 3, 4
        q = floats(1, 10, H + 2, D_QK + 8).astype(BF16)[:, :H, :D_QK]
        rows = T * H
        memory = GlobalMemory()
        address = memory.add("q", q)
        flat = q[n0 : n0 + T].reshape(rows, D_QK).astype(np.float32)
        width = 8 * form.tiles_per_score_warp

        def body(ops: Any) -> None:
            rank = current().block.x
            for my_row in (0, 8, 16, 24):
                found = ops.load_q(address, q.strides[0], q.strides[1], n0, my_row, rows, H, rank)
                v, r = form.value_columns, form.rope_columns
                mine = flat[my_row : my_row + width]
                value = mine[:, rank * v : (rank + 1) * v]
                rope = mine[:, D_V + rank * r : D_V + (rank + 1) * r]
                expected = np.zeros((width, v + r), np.float32)
                expected[: len(mine)] = np.concatenate([value, rope], axis=1)
                assert np.array_equal(found, expected)

        inside(form, body, memory=memory)

    def test_scores_are_products_and_zero_for_a_tile_the_warp_lacks(self, form: Geometry) -> None:
        columns = form.value_columns + form.rope_columns
        rows = floats(2, TILE, columns).astype(BF16)
        queries = floats(3, 8 * form.tiles_per_score_warp, columns)

        def body(ops: Any) -> None:
            put_stage(form, rows)
            exact = rows.astype(np.float64) @ queries.astype(np.float64).T
            for me in range(form.score_warps):
                active = 8 * active_tiles(form, me)
                scores = ops.score(form.shared.stage, queries, me)
                assert np.allclose(scores[:, :active], exact[:, :active], rtol=1e-4, atol=1e-4)
                assert not scores[:, active:].any()
            assert not ops.no_scores().any()

        inside(form, body)

    @pytest.mark.parametrize("me", range(ODD.score_warps))
    def test_both_blocks_receive_the_same_sum(self, me: int) -> None:
        parts = floats(4, 2, TILE, 16)
        found: dict[int, Array] = {}

        def body(ops: Any) -> None:
            warp = current()
            rank, bar = warp.block.x, ODD.shared.exchange_full
            warp.block.init_mbarrier(bar, 1, "exchange_full")
            warp.sync(warp.cluster.all_warps)
            ops.send(parts[rank], ODD.shared.kept, ODD.shared.exchange, bar, me, rank)
            ops.wait_cluster(bar, 0)
            found[rank] = ops.receive(ODD.shared.kept, ODD.shared.exchange, me)

        inside(ODD, body)
        active = 8 * active_tiles(ODD, me)
        assert np.array_equal(found[0], found[1])
        assert np.array_equal(found[0][:, :active], (parts[0] + parts[1])[:, :active])
        assert not found[0][:, active:].any()

    def test_values_that_are_not_finite_become_zero(self, form: Geometry) -> None:
        columns = form.value_columns + form.rope_columns
        rows = floats(5, TILE, columns).astype(BF16)
        rows[3, 7], rows[9, 0], rows[15, form.value_columns - 1], rows[4, form.value_columns] = (
            np.nan, np.inf, -np.inf, np.nan,
        )  # fmt: skip
        expected = np.where(np.isfinite(rows.astype(np.float32)), rows, BF16(0))
        expected[4, form.value_columns] = np.nan

        def body(ops: Any) -> None:
            warp = current()
            if warp.index == 0:
                put_stage(form, rows)
            warp.sync(warp.block.all_warps)
            ops.clean_values(form.shared.stage, warp.index)
            warp.sync(warp.block.all_warps)
            view = warp.block.shared.view(form.shared.stage, np.uint16, (TILE, columns), form.row_stride)
            assert np.array_equal(view.view(BF16), expected, equal_nan=True)

        inside(form, body, warps=form.score_warps)


class TestMasks:
    def test_keep_first(self) -> None:
        scores = floats(6, TILE, 8)
        kept = keep_first(scores, 5)
        assert np.array_equal(kept[:5], scores[:5])
        assert np.isneginf(kept[5:]).all()

    @pytest.mark.parametrize(("T", "H"), [(1, 1), (9, 8), (16, 5), (20, 3), (33, 1)])
    @pytest.mark.parametrize("prefix", [0, 7])
    def test_the_mask_decides_and_nothing_else_is_read(self, T: int, H: int, prefix: int) -> None:
        mask = tree_mask(np.random.default_rng(T), T, "random")
        stride = prefix + T
        # Exactly the cells of the mask from the first tree cell on: any other read is a fault.
        cells = np.concatenate([np.ones((T, prefix), bool), mask], axis=1).ravel()[prefix:]
        memory = GlobalMemory()
        address = memory.add("custom_mask", cells)

        def body(ops: object) -> None:
            for token0 in range(0, T, TILE):
                for my_row in range(0, T * H + 16, 16):
                    scores = floats(7, TILE, 16)
                    scores[3] = np.nan
                    found = keep_visible(scores, address, stride, QLEN_ONLY, my_row, H, T, token0)
                    assert np.array_equal(
                        found, self.expected(scores, mask, my_row, H, token0), equal_nan=True
                    )

        inside(ODD, body, memory=memory)

    @pytest.mark.parametrize(("T", "H"), [(1, 1), (9, 8), (20, 3)])
    def test_a_chain_needs_no_mask(self, T: int, H: int) -> None:
        mask = np.tri(T, dtype=bool)
        for token0 in range(0, T, TILE):
            for my_row in range(0, T * H + 16, 16):
                scores = floats(8, TILE, 16)
                found = keep_visible(scores, 0, 0, CHAIN, my_row, H, T, token0)
                assert np.array_equal(found, self.expected(scores, mask, my_row, H, token0))

    @staticmethod
    def expected(scores: Array, mask: Array, my_row: int, H: int, token0: int) -> Array:
        T = len(mask)
        kept = np.full_like(scores, -np.inf)
        for m, column in np.ndindex(*scores.shape):
            i, j = (my_row + column) // H, token0 + m
            if i < T and j < T and mask[i, j]:
                kept[m, column] = scores[m, column]
        return kept


class TestSoftmax:
    def test_exponents_keep_minus_infinity_under_the_lowest_maximum(self) -> None:
        m = np.array([LOWEST, 2], np.float32)
        scores = np.array([[-np.inf, -np.inf], [1, 1], [np.nan, 0]], np.float32)
        with np.errstate(over="ignore"):
            d = exponents(scores, 0.5, m)
        assert np.isneginf(d[0]).all()
        assert d[1, 0] > 1e38
        assert d[1, 1] == -1.5
        assert np.isnan(d[2, 0])
        assert d[2, 1] == -2

    @pytest.mark.parametrize(
        ("value", "expected"), [(8, 0), (8.001, 1), (np.nan, 0), (-np.inf, 0), (np.inf, 1)]
    )
    def test_exceeds_beyond_eight(self, value: float, expected: int) -> None:
        d = np.zeros((TILE, 8), np.float32)
        d[3, 5] = value
        assert exceeds(d) == expected

    def test_grow_takes_the_maximum_and_ignores_nan(self) -> None:
        scores = np.full((TILE, 3), -np.inf, np.float32)
        scores[2] = [4, np.nan, np.nan]
        scores[5] = [2, 6, -np.inf]
        grown = grow(scores, 0.5, np.array([1, 1, LOWEST], np.float32))
        assert grown.tolist() == [2, 3, LOWEST]

    def test_rescale_of_the_first_maximum_is_zero_and_of_none_is_one(self) -> None:
        m = np.array([LOWEST, LOWEST, 1], np.float32)
        with np.errstate(under="ignore"):
            assert rescale(m, np.array([-3, LOWEST, 3], np.float32)).tolist() == [0, 1, 0.25]

    def test_what_a_score_warp_stores(self, form: Geometry) -> None:
        g, at = form, form.shared
        rows = 8 * g.tiles_per_score_warp
        p = np.abs(floats(9, g.score_warps, TILE, rows))
        values = np.abs(floats(10, g.score_warps, rows))
        values[0, 0] = 0

        def body(ops: Any) -> None:
            for me in range(g.score_warps):
                my_tile = me * g.tiles_per_score_warp
                ops.store_alpha(at.alpha, values[me], my_tile)
                ops.store_inverse(at.inverse, values[me], my_tile)
                ops.store_weights(at.weights, p[me], my_tile)
                ops.store_grew(at.grew + 4 * me, me % 2)
                ops.store_maxima(at.maxima, values[me], me)
            view = current().block.shared.view
            flat = values.reshape(-1)[: g.rows]
            assert np.array_equal(view(at.alpha, np.float32, (g.rows,)), flat)
            inverse = view(at.inverse, np.float32, (g.rows,))
            assert inverse[0] == 0
            assert np.allclose(inverse[1:] * flat[1:], 1)
            weights = view(at.weights, np.uint16, (g.n_tiles, TILE, 8)).view(BF16)
            expected = p.reshape(g.score_warps, TILE, -1, 8).transpose(0, 2, 1, 3).reshape(-1, TILE, 8)
            assert np.array_equal(weights, expected[: g.n_tiles].astype(BF16))
            assert view(at.grew, np.int32, (g.score_warps,)).tolist() == [i % 2 for i in range(g.score_warps)]
            assert ops.any_grew(at.grew) == (g.score_warps > 1)
            for me in range(g.score_warps):
                assert np.array_equal(ops.load_maxima(at.maxima, me), values[me])

        inside(form, body)

    @pytest.mark.parametrize("natural", [0, 1])
    def test_lse_of_full_empty_and_poisoned_rows(self, natural: int) -> None:
        m = np.array([3, LOWEST, 1, 5, 9, 9, 9, 9], np.float32)
        sums = np.array([4, 0, np.nan, 1, 1, 1, 1, 1], np.float32)
        lse = np.full(20, 77, np.float32)
        memory = GlobalMemory()
        address = memory.add("lse", lse)
        inside(ODD, lambda ops: store_lse(address, 6, m, sums, 8, 12, natural), memory=memory)
        unit = np.log(2) if natural else 1
        assert np.allclose(lse[[14, 17]], [5 * unit, 5 * unit])
        assert np.isneginf(lse[15])
        assert np.isnan(lse[16])
        assert (lse[[13, 18]] == 77).all()


class TestValues:
    def test_a_partial_lies_as_mma_leaves_it(self) -> None:
        o = floats(11, 24, 32)
        packed = pack_partial(o)
        for row, column in np.ndindex(24, 32):
            n, c = divmod(row, 8)
            half, d = divmod(column, 16)
            assert packed[n, half, 4 * (d % 8) + c // 2, 2 * (d // 8) + c % 2] == o[row, column]
        assert np.array_equal(unpack_partial(packed), o)

    def test_accumulate_and_scale(self, form: Geometry) -> None:
        g, at = form, form.shared
        rows = floats(12, TILE, g.value_columns + g.rope_columns).astype(BF16)
        p = np.abs(floats(13, g.n_tiles, TILE, 8)).astype(BF16)
        width = g.value_columns // 8
        o = floats(14, g.rows, width)
        alpha = np.abs(floats(15, g.rows))
        grew = np.arange(8, dtype=np.int32) % 2
        weights = p.astype(np.float64).transpose(0, 2, 1).reshape(g.rows, TILE)

        def body(ops: Any) -> None:
            put_stage(g, rows)
            put(at.weights, p.view(np.uint16))
            put(at.grew, grew)
            put(
                at.alpha,
                np.where(np.repeat(grew, g.tiles_per_score_warp * 8)[: g.rows], alpha, np.nan).astype("f4"),
            )
            for me in range(8):
                exact = o + weights @ rows[:, width * me : width * (me + 1)].astype(np.float64)
                assert np.allclose(ops.accumulate(o, at.stage, at.weights, me), exact, rtol=1e-5, atol=1e-5)
            factor = np.where(np.repeat(grew, 8 * g.tiles_per_score_warp)[: g.rows], alpha, 1)
            assert np.array_equal(ops.scale_o(o, at.alpha, at.grew), o * factor[:, None].astype(np.float32))
            assert ops.zero_o().shape == o.shape

        inside(form, body)

    def test_results_and_partials_reach_their_places(self, form: Geometry) -> None:
        g = form
        whole = floats(16, g.rows, D_V)
        inverse = np.abs(floats(17, g.rows))
        rows, offset = g.rows - 3, 5
        out = np.full((g.rows + 10, D_V), 7, BF16)
        part = np.full((3, g.n_tiles, D_V // 32, 2, 32, 4), 7, np.float32)
        memory = GlobalMemory()
        at_out, at_part = memory.add("out", out), memory.add("part_o", part)
        width = g.value_columns // 8

        def body(ops: Any) -> None:
            rank = current().block.x
            put(g.shared.inverse, inverse)
            for me in range(8):
                o = whole[:, rank * g.value_columns + width * me :][:, :width]
                ops.store_out(o, g.shared.inverse, at_out, offset, 0, rows, rank, me)
                ops.store_partial(o, g.shared.inverse, at_part, g.rows, rank, me)

        inside(form, body, memory=memory)
        normalised = whole * inverse[:, None]
        assert np.array_equal(out[offset : offset + rows], normalised[:rows].astype(BF16))
        assert (out[:offset] == 7).all()
        assert (out[offset + rows :] == 7).all()
        groups = [unpack_partial(part[1, :, group]) for group in range(D_V // 32)]
        assert np.array_equal(np.concatenate(groups, axis=1), normalised)
        assert (part[[0, 2]] == 7).all()


class TestMerge:
    def test_parts_merge_as_the_oracle_says(self) -> None:
        lse, o = 3 * floats(18, 5, 8), floats(19, 5, 8, 32)
        lse[1], lse[:, 4], o[1], o[:, 4] = -np.inf, -np.inf, np.nan, np.nan
        with np.errstate(invalid="ignore"):
            part = combine(lse, np.ones_like(lse), o)
        exact, exact_lse = oracle_merge([(o[p], lse[p] * np.log(2)) for p in range(5)])
        assert not part.s[4]
        rows = np.arange(8) != 4
        assert np.allclose((part.o / np.where(part.s == 0, 1, part.s)[:, None])[rows], exact[rows], atol=1e-6)
        assert np.allclose((part.m[rows] + np.log2(part.s[rows])) * np.log(2), exact_lse[rows], atol=1e-6)

    def test_a_nan_part_shows(self) -> None:
        lse = np.zeros((3, 8), np.float32)
        lse[1, 2], lse[:2, 3] = np.nan, [-np.inf, np.nan]
        with np.errstate(invalid="ignore"):
            part = combine(lse, np.ones_like(lse), np.ones((3, 8, 32), np.float32))
        assert np.flatnonzero(np.isnan(part.s)).tolist() == [2, 3]

    @pytest.mark.parametrize("group", [0, 3])
    def test_only_the_requests_rows_are_written(self, group: int) -> None:
        out, lse = np.full((20, D_V), 7, BF16), np.full(20, 7, np.float32)
        memory = GlobalMemory()
        at = memory.add("out", out), memory.add("lse", lse)
        s = np.array([2, 0, 1, 1, 1, 1, 1, 1], np.float32)
        o = np.ones((8, 32), np.float32)
        o[1] = 0
        with np.errstate(divide="ignore", invalid="ignore"):
            part = combine(np.ones((1, 8), np.float32), s[None], o[None])
        inside(ODD, lambda ops: store_merged(part, *at, 3, 1, group, 11), memory=memory)
        columns = slice(32 * group, 32 * group + 32)
        assert out[11:14, columns].astype(float).mean(axis=1).tolist() == [0.5, 0, 1]
        out[11:14, columns] = 7
        assert (out == 7).all()
        if group == 0:
            assert np.allclose(lse[[11, 13]], [2 * np.log(2), np.log(2)])
            assert np.isneginf(lse[12])
            lse[11:14] = 7
        assert (lse == 7).all()
