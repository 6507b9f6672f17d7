"""The operations of a score warp against plain NumPy."""

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
from verify_numba.lockstep.ownership import my_tiles, owned_count, owner_of
from verify_numba.lockstep.score_ops import keep_first, keep_visible
from verify_numba.lockstep.softmax_ops import exceeds, exponents, grow, rescale

LOWEST = np.finfo(np.float32).min


class TestQueriesAndScores:
    def test_load_q_takes_the_rows_and_columns_of_the_warp(self, form: Geometry) -> None:
        H, n0, T, row0 = 5, 3, 4, 8
        q = floats(1, 10, H + 2, D_QK + 8).astype(BF16)[:, :H, :D_QK]
        rows = T * H
        memory = GlobalMemory()
        address = memory.add("q", q)
        padded = np.zeros((row0 + form.rows, D_QK), np.float32)
        padded[: min(rows, len(padded))] = q[n0 : n0 + T].reshape(rows, D_QK)[: len(padded)]
        width = 16 * form.warp_k_steps

        def body(ops: Any) -> None:
            rank = current().block.x
            v, r = form.value_columns, form.rope_columns
            value = padded[:, rank * v : (rank + 1) * v]
            rope = padded[:, D_V + rank * r : D_V + (rank + 1) * r]
            mine = np.concatenate([value, rope], axis=1)
            for me in range(form.score_warps):
                found = ops.load_q(address, q.strides[0], q.strides[1], n0, row0, rows, H, rank, me)
                share = me % form.k_groups
                at = [row0 + 8 * tile + i for tile in my_tiles(form, me) for i in range(8)]
                assert np.array_equal(found, mine[at, width * share : width * (share + 1)])

        inside(form, body, memory=memory)

    def test_products_are_over_the_columns_of_the_warp(self, form: Geometry) -> None:
        columns, width = form.value_columns + form.rope_columns, 16 * form.warp_k_steps
        rows = floats(2, TILE, columns).astype(BF16)
        queries = floats(3, 8 * form.group_tiles, width)

        def body(ops: Any) -> None:
            put_stage(form, rows)
            for me in range(form.score_warps):
                mine = rows[:, width * (me % form.k_groups) :][:, :width].astype(np.float64)
                products = ops.score(form.shared.stage, queries, me)
                assert np.allclose(products, mine @ queries.T.astype(np.float64), rtol=1e-4, atol=1e-4)

        inside(form, body)

    def test_every_row_tile_has_one_owner_that_multiplies_it_first(self, form: Geometry) -> None:
        owned = [my_tiles(form, me)[: owned_count(form, me)] for me in range(form.score_warps)]
        assert sorted(tile for tiles in owned for tile in tiles) == list(range(form.n_tiles))
        for me, tiles in enumerate(owned):
            assert 1 <= len(tiles) <= form.owned_tiles
            assert list(tiles) == list(range(tiles[0], tiles[0] + len(tiles)))
            assert all(owner_of(form, tile) == me for tile in tiles)
            others = [w for w in range(form.score_warps) if set(my_tiles(form, w)) == set(my_tiles(form, me))]
            assert len(others) == form.k_groups
            assert sorted(w % form.k_groups for w in others) == list(range(form.k_groups))

    def test_an_owner_receives_every_part_of_its_rows(self, form: Geometry) -> None:
        g = form
        products = floats(4, g.cluster, g.score_warps, TILE, 8 * g.group_tiles)
        tiles = np.zeros((g.n_tiles, TILE, 8))
        for rank in range(g.cluster):
            for me in range(g.score_warps):
                for j, row_tile in enumerate(my_tiles(g, me)):
                    tiles[row_tile] += products[rank, me, :, 8 * j : 8 * j + 8]

        def body(ops: Any) -> None:
            warp = current()
            rank, me, base = warp.block.x, warp.index, g.shared.exchange
            if me == 0:
                ops.init_barriers(0)
            warp.sync(warp.cluster.all_warps)
            kept = ops.no_scores()
            for turn in range(4):
                buffer = base + g.exchange_bytes * (turn % 2)
                bars = g.shared.exchange_full + 8 * g.score_warps * (turn % 2)
                mine = products[rank, me] * np.float32(turn + 1)
                ops.send(mine, buffer, bars, me, rank)
                kept = ops.own(mine)
                whole = ops.receive(kept, buffer, bars, turn // 2, me)
                assert whole.shape == ops.no_scores().shape
                for j, row_tile in enumerate(my_tiles(g, me)[: owned_count(g, me)]):
                    assert np.allclose(whole[:, 8 * j : 8 * j + 8], tiles[row_tile] * (turn + 1), atol=1e-4)
                if g.exchange_slots:
                    assert not whole[:, 8 * owned_count(g, me) :].any()
            assert ops.no_products().shape == products.shape[2:]
            warp.sync(warp.cluster.all_warps)

        inside(form, body, warps=form.score_warps)

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
        rows = 8 * g.owned_tiles
        p = np.abs(floats(9, g.score_warps, TILE, rows))
        values = np.abs(floats(10, g.score_warps, rows))
        values[0, 0] = 0
        counts = [owned_count(g, me) for me in range(g.score_warps)]

        def body(ops: Any) -> None:
            for me in range(g.score_warps):
                ops.store_alpha(at.alpha, values[me], me)
                ops.store_inverse(at.inverse, values[me], me)
                ops.store_weights(at.weights, p[me], me)
                ops.store_grew(at.grew + 4 * me, me % 2)
                ops.store_maxima(at.maxima, values[me], me)
                assert ops.owned_tile(me) == sum(counts[:me])
            view = current().block.shared.view
            flat = np.concatenate([values[me, : 8 * count] for me, count in enumerate(counts)])
            assert np.array_equal(view(at.alpha, np.float32, (g.rows,)), flat)
            inverse = view(at.inverse, np.float32, (g.rows,))
            assert inverse[0] == 0
            assert np.allclose(inverse[1:] * flat[1:], 1)
            weights = view(at.weights, np.uint16, (g.n_tiles, TILE, 8)).view(BF16)
            expected = [p[me, :, 8 * j : 8 * j + 8] for me, count in enumerate(counts) for j in range(count)]
            assert np.array_equal(weights, np.array(expected).astype(BF16))
            assert view(at.grew, np.int32, (g.score_warps,)).tolist() == [i % 2 for i in range(g.score_warps)]
            assert ops.any_grew(at.grew) == (g.score_warps > 1)
            for me in range(g.score_warps):
                assert np.array_equal(ops.load_maxima(at.maxima, me), values[me])

        inside(form, body)

    @pytest.mark.parametrize("natural", [0, 1])
    def test_lse_of_full_empty_and_poisoned_rows(self, natural: int) -> None:
        """Warp 0 owns two row tiles, warp 1 one; the request has 20 rows."""
        m = np.array([3, LOWEST, 1, 5, *[9] * 12], np.float32)
        sums = np.array([4, 0, np.nan, *[1] * 13], np.float32)
        lse = np.full(30, 77, np.float32)
        memory = GlobalMemory()
        address = memory.add("lse", lse)

        def body(ops: Any) -> None:
            ops.store_lse(address, 6, m, sums, 0, 0, 20, natural)
            ops.store_lse(address, 6, m, sums, 1, 16, 20, natural)

        inside(ODD, body, memory=memory)
        unit = np.log(2) if natural else 1
        assert (lse[:6] == 77).all()
        for first in (6, 22):
            assert np.allclose(lse[[first, first + 3]], [5 * unit, 5 * unit])
            assert np.isneginf(lse[first + 1])
            assert np.isnan(lse[first + 2])
        assert np.allclose(lse[10:22], 9 * unit)
        assert (lse[26:] == 77).all()
