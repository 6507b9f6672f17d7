"""The operations of value warps and of the merge against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oracle.attention import merge as oracle_merge
from tests.lockstep.support import inside
from tests.lockstep.tiles import BF16, ODD, floats, notes_of, put, put_stage
from verify_numba.dims import D_V
from verify_numba.geometry import TILE, Geometry
from verify_numba.lockstep import GlobalMemory
from verify_numba.lockstep.bf16 import narrow, widen
from verify_numba.lockstep.machine import current
from verify_numba.lockstep.merge_ops import combine, store_merged
from verify_numba.lockstep.value_ops import pack_partial, unpack_partial


def test_bf16_bits_there_and_back() -> None:
    bits = np.arange(1 << 16).astype(np.uint16)
    with np.errstate(invalid="ignore"):
        back = narrow(widen(bits))
    number = ~np.isnan(widen(bits))
    assert np.array_equal(back[number], bits[number])
    assert np.isnan(widen(back[~number])).all()
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    assert widen(narrow(ties)).tolist() == [1, 1 + 2**-6]


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
        # The last warp's columns may end among the rope columns.
        rows = floats(12, TILE, g.value_columns + g.rope_columns).astype(BF16)
        p = np.abs(floats(13, g.n_tiles, TILE, 8)).astype(BF16)
        width = 16 * g.m_tiles
        o = floats(14, g.rows, width)
        alpha = np.abs(floats(15, g.rows))
        # Of the softmax warps of both blocks, in the order of their first row tiles.
        grew = np.arange(g.softmax_stride, dtype=np.int32) % 2
        grown = np.repeat(grew[np.arange(g.n_tiles) % g.softmax_stride], 8)
        weights = p.astype(np.float64).transpose(0, 2, 1).reshape(g.rows, TILE)

        def body(ops: Any) -> None:
            put_stage(g, rows)
            put(at.weights, p.view(np.uint16))
            put(at.alpha, notes_of(g, np.where(grown, alpha, np.float32(np.nan)), grew))
            for me in range(g.value_warps):
                exact = o + weights @ rows[:, width * me : width * (me + 1)].astype(np.float64)
                assert np.allclose(ops.accumulate(o, at.stage, at.weights, me), exact, rtol=1e-5, atol=1e-5)
            factor = np.where(grown, alpha, np.float32(1))
            assert ops.any_grew(at.alpha) == grew.any()
            assert np.array_equal(ops.scale_o(o, at.alpha), o * factor[:, None])
            assert ops.zero_o().shape == o.shape

        inside(form, body)

    def test_results_and_partials_reach_their_places(self, form: Geometry) -> None:
        g = form
        width = 16 * g.m_tiles
        # What the last warp multiplied behind its last column is in no result.
        behind = np.full((g.rows, width * g.value_warps - g.value_columns), np.nan, np.float32)
        whole = floats(16, g.rows, D_V)
        inverse = np.abs(floats(17, g.rows))
        rows, offset = g.rows - 3, 5
        out = np.full((g.rows + 10, D_V), 7, BF16)
        part = np.full((3, g.n_tiles, D_V // 32, 2, 32, 4), 7, np.float32)
        memory = GlobalMemory()
        at_out, at_part = memory.add("out", out), memory.add("part_o", part)

        def body(ops: Any) -> None:
            rank = current().block.x
            put(g.shared.inverse, notes_of(g, inverse, np.zeros(g.softmax_stride)))
            mine = whole[:, rank * g.value_columns :][:, : g.value_columns]
            computed = np.concatenate([mine, behind], axis=1)
            for me in range(g.value_warps):
                o = computed[:, width * me : width * (me + 1)]
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
