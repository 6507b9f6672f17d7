"""Scores of a tile: queries, S = K Q^T over a share of the columns, the masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.dims import D_V
from verify_numba.geometry import MMA_K, MMA_N, TILE, Geometry
from verify_numba.kernels.work import CHAIN
from verify_numba.lockstep.bf16 import EXPONENT, widen
from verify_numba.lockstep.machine import current

Floats = NDArray[np.float32]
Seen = NDArray[np.bool_]
QUERY_ALIGN = 16
"""The cluster form's lanes load eight neighbouring columns at once; both forms are held to it, as a call is."""


def keep_first(scores: Floats, nvalid: int) -> Floats:
    """Tokens behind the end of the prefix become invisible."""
    kept = scores.copy()
    kept[nvalid:] = -np.inf
    return kept


def keep_seen(scores: Floats, visible: Seen) -> Floats:
    """Tokens that a row does not see become invisible; also a NaN does."""
    return np.where(visible, scores, np.float32(-np.inf))


def mask_ops(g: Geometry) -> dict[str, Any]:
    """Which scores of a softmax warp's rows count."""
    my_rows = MMA_N * g.softmax_tiles
    steps = g.softmax_stride * MMA_N * np.arange(g.softmax_tiles)
    row_offsets = (steps[:, None] + np.arange(MMA_N)).ravel()

    def seen(cells: int, stride: int, layout: int, my_row: int, H: int, T: int, token0: int) -> Seen:
        """[16, my_rows] whether a row sees a draft token; behind the end it does not, and no cell is read."""
        i = (my_row + row_offsets) // H
        j = token0 + np.arange(TILE)
        if layout == CHAIN:
            return (i < T) & (j[:, None] < T) & (j[:, None] <= i)
        width = min(TILE, T - token0)
        visible = np.zeros((TILE, my_rows), bool)
        tokens = i[i < T]
        if width > 0 and len(tokens):
            mask = current().memory.load_rows(cells + tokens * stride + token0, width, 1)
            visible[:width, : len(tokens)] = mask.T != 0
        return visible

    return {
        "nothing_seen": lambda: np.zeros((TILE, my_rows), bool),
        "seen": seen,
        "keep_seen": keep_seen,
        "keep_first": keep_first,
    }


def score_ops(g: Geometry) -> dict[str, Any]:
    """Products of a group of row tiles over a share of the block's columns."""
    share_columns = MMA_K * g.warp_k_steps

    def load_q(
        q: int,
        token_stride: int,
        head_stride: int,
        n0: int,
        row: int,
        rows: int,
        H: int,
        rank: int,
        part: int,
    ) -> Floats:
        """[8 * group_tiles, share_columns] queries from `row` on; zero behind the last row."""
        memory = current().memory
        r = row + np.arange(MMA_N * g.group_tiles)
        r = r[r < rows]
        queries = np.zeros((MMA_N * g.group_tiles, g.value_columns + g.rope_columns), np.float32)
        if len(r):
            source = q + (n0 + r // H) * token_stride + r % H * head_stride
            value = 2 * rank * g.value_columns, 2 * g.value_columns
            rope = 2 * (D_V + rank * g.rope_columns), 2 * g.rope_columns
            bits = [memory.load_rows(source + at, nbytes, QUERY_ALIGN) for at, nbytes in (value, rope)]
            queries[: len(r)] = widen(np.concatenate(bits, axis=1).view(np.uint16))
        return queries[:, share_columns * part : share_columns * (part + 1)]

    def score(stage: int, queries: Floats, part: int) -> Floats:
        """[16, 8 * group_tiles] products over column share `part`."""
        keys = widen(
            current().read(stage + 2 * share_columns * part, np.uint16, (TILE, share_columns), g.row_stride)
        )
        products: Floats = keys @ queries.T
        return products

    def clean_values(stage: int, me: int) -> None:
        """Zeroes values that are not finite, for 0 * NaN is NaN: some rows a warp, once all have scored."""
        warp = current()
        warp.sync(warp.block.named_barrier("score warps", g.score_warps))
        for token in range(me, TILE, g.score_warps):
            values = warp.write(stage + g.row_stride * token, np.uint16, (1, g.value_columns))
            values[(values & EXPONENT) == EXPONENT] = 0

    return {
        "load_q": load_q,
        "score": score,
        "clean_values": clean_values,
    }
