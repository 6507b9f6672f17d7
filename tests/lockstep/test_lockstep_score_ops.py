"""The operations of score and softmax warps against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.lockstep.support import Array, inside
from tests.lockstep.tiles import BF16, ODD, floats, put_stage
from tests.trees import tree_mask
from verify_numba.dims import D_QK, D_V
from verify_numba.geometry import TILE, Geometry
from verify_numba.kernels.work import CHAIN, QLEN_ONLY
from verify_numba.lockstep import GlobalMemory
from verify_numba.lockstep.machine import current
from verify_numba.lockstep.score_ops import keep_first, keep_seen
from verify_numba.lockstep.softmax_ops import exceeds, exponents, grow, inverses, rescale

LOWEST = np.finfo(np.float32).min


class TestQueriesAndScores:
    def test_load_q_takes_the_rows_and_columns_of_the_warp(self, form: Geometry) -> None:
        H, n0, T, row0 = 5, 3, 4, 8
        q = floats(1, 10, H + 2, D_QK + 8).astype(BF16)[:, :H, :D_QK]
        rows, count, width = T * H, 8 * form.group_tiles, 16 * form.warp_k_steps
        memory = GlobalMemory()
        address = memory.add("q", q)
        flat = np.zeros((row0 + form.rows + rows, D_QK), np.float32)
        flat[:rows] = q[n0 : n0 + T].reshape(rows, D_QK)

        def body(ops: Any) -> None:
            rank = current().block.x
            v, r = form.value_columns, form.rope_columns
            value = flat[:, rank * v : (rank + 1) * v]
            rope = flat[:, D_V + rank * r : D_V + (rank + 1) * r]
            mine = np.concatenate([value, rope], axis=1)
            for row in range(row0, row0 + form.rows, count):
                for part in range(form.k_groups):
                    found = ops.load_q(
                        address, q.strides[0], q.strides[1], n0, row, rows, H, rank, part
                    )  # fmt: skip
                    assert np.array_equal(found, mine[row : row + count, width * part : width * (part + 1)])

        inside(form, body, memory=memory)

    def test_products_are_over_a_share_of_the_columns(self, form: Geometry) -> None:
        columns, width = form.value_columns + form.rope_columns, 16 * form.warp_k_steps
        rows = floats(2, TILE, columns).astype(BF16)
        queries = floats(3, 8 * form.group_tiles, width)

        def body(ops: Any) -> None:
            put_stage(form, rows)
            for part in range(form.k_groups):
                mine = rows[:, width * part : width * (part + 1)].astype(np.float64)
                products = ops.score(form.shared.stage, queries, part)
                assert np.allclose(products, mine @ queries.T.astype(np.float64), rtol=1e-4, atol=1e-4)

        inside(form, body)

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
    def test_the_mask_decides_and_nothing_else_is_read(self, form: Geometry, T: int, H: int, prefix: int) -> None:
        mask = tree_mask(np.random.default_rng(T), T, "random")
        stride = prefix + T
        # Exactly the cells of the mask from the first tree cell on: any other read is a fault.
        cells = np.concatenate([np.ones((T, prefix), bool), mask], axis=1).ravel()[prefix:]
        memory = GlobalMemory()
        address = memory.add("custom_mask", cells)

        def body(ops: Any) -> None:
            for token0 in range(0, T + TILE, TILE):
                for my_row in range(0, T * H + 16, 8):
                    found = ops.seen(address, stride, QLEN_ONLY, my_row, H, T, token0)
                    assert np.array_equal(found, self.expected(form, mask, my_row, H, token0))

        inside(form, body, memory=memory)

    @pytest.mark.parametrize(("T", "H"), [(1, 1), (9, 8), (20, 3)])
    def test_a_chain_needs_no_mask(self, form: Geometry, T: int, H: int) -> None:
        mask = np.tri(T, dtype=bool)

        def body(ops: Any) -> None:
            for token0 in range(0, T + TILE, TILE):
                for my_row in range(0, T * H + 16, 8):
                    found = ops.seen(0, 0, CHAIN, my_row, H, T, token0)
                    assert np.array_equal(found, self.expected(form, mask, my_row, H, token0))

        inside(form, body)

    @staticmethod
    def expected(g: Geometry, mask: Array, my_row: int, H: int, token0: int) -> Array:
        """What one softmax warp's rows see of one tile."""
        T = len(mask)
        visible = np.zeros((TILE, 8 * g.softmax_tiles), bool)
        for m, column in np.ndindex(visible.shape):
            tile, row = divmod(column, 8)
            i, j = (my_row + 8 * g.softmax_stride * tile + row) // H, token0 + m
            visible[m, column] = i < T and j < T and mask[i, j]
        return visible

    def test_what_is_not_seen_is_minus_infinity_even_if_nan(self) -> None:
        scores = np.array([[np.nan, np.nan], [1, 2]], np.float32)
        kept = keep_seen(scores, np.array([[False, True], [True, False]]))
        assert np.isneginf(kept[[0, 1], [0, 1]]).all()
        assert np.isnan(kept[0, 1])
        assert kept[1, 0] == 1


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

    @pytest.mark.parametrize(("value", "expected"), [(8, 0), (8.001, 1), (np.nan, 0), (-np.inf, 0), (np.inf, 1)])
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

    def test_inverses_are_zero_for_rows_that_saw_nothing(self) -> None:
        with np.errstate(divide="ignore"):
            inverse = inverses(np.array([4, 0, 0.5, np.nan], np.float32))
        assert inverse[:3].tolist() == [0.25, 0, 2]
        assert np.isnan(inverse[3])

    @pytest.mark.parametrize("natural", [0, 1])
    def test_lse_of_full_empty_and_poisoned_rows(self, natural: int) -> None:
        """A row tile of the warp ends with the request; of the next, softmax_stride tiles on, no row is there."""
        m = np.array([3, LOWEST, 1, 5, 9, 9, 9, 9] * ODD.softmax_tiles, np.float32)
        sums = np.array([4, 0, np.nan, 1, 1, 1, 1, 1] * ODD.softmax_tiles, np.float32)
        lse = np.full(100, 77, np.float32)
        memory = GlobalMemory()
        address = memory.add("lse", lse)
        second = 8 + 8 * ODD.softmax_stride
        rows = second + 4
        inside(ODD, lambda ops: ops.store_lse(address, 6, m, sums, 8, rows, natural), memory=memory)
        unit = np.log(2) if natural else 1
        for row, there in ((8, 8), (second, 4)):
            found = lse[6 + row : 6 + row + 8]
            assert np.allclose(found[[0, 3]], [5 * unit, 5 * unit])
            assert np.isneginf(found[1])
            assert np.isnan(found[2])
            assert (found[there:] == 77).all()
        assert (lse[: 6 + 8] == 77).all()
        assert (lse[6 + 16 : 6 + second] == 77).all()
        assert (lse[6 + rows :] == 77).all()
