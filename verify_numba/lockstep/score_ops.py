"""Scores of a tile: queries, S = K Q^T, the exchange between the blocks of a cluster, the masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.dims import D_V
from verify_numba.geometry import MMA_N, TILE, Geometry
from verify_numba.kernels.work import CHAIN
from verify_numba.lockstep.bf16 import EXPONENT, widen
from verify_numba.lockstep.machine import current

Floats = NDArray[np.float32]
N8_BYTES = 4 * TILE * MMA_N
"""Scores of one n8 tile."""
QUERY_ALIGN = 4
"""A lane loads two neighbouring columns at once."""


def active_tiles(g: Geometry, me: int) -> int:
    """n8 tiles that score warp `me` has: one less than the others where they do not come out even."""
    return min(g.tiles_per_score_warp, g.n_tiles - g.tiles_per_score_warp * me)


def keep_first(scores: Floats, nvalid: int) -> Floats:
    """Tokens behind the end of the prefix become invisible."""
    kept = scores.copy()
    kept[nvalid:] = -np.inf
    return kept


def keep_visible(
    scores: Floats, cells: int, stride: int, layout: int, my_row: int, H: int, T: int, token0: int
) -> Floats:
    """Tokens that the tree mask hides from a row become invisible; also a NaN does."""
    i = (my_row + np.arange(scores.shape[1])) // H
    j = token0 + np.arange(TILE)
    inside = (i < T) & (j[:, None] < T)
    if layout == CHAIN:
        return np.where(inside & (j[:, None] <= i), scores, np.float32(-np.inf))
    width = min(TILE, T - token0)
    visible = np.zeros(scores.shape, bool)
    tokens = i[i < T]
    if width > 0 and len(tokens):
        mask = current().memory.load_rows(cells + tokens * stride + token0, width, 1)
        visible[:width, : len(tokens)] = mask.T != 0
    return np.where(visible, scores, np.float32(-np.inf))


def score_ops(g: Geometry) -> dict[str, Any]:
    columns = g.value_columns + g.rope_columns
    my_rows = MMA_N * g.tiles_per_score_warp

    def load_q(
        q: int, token_stride: int, head_stride: int, n0: int, my_row: int, rows: int, H: int, rank: int
    ) -> Floats:
        """[my_rows, columns] queries, the block's value columns and then its rotary ones; zero behind the last row."""
        memory = current().memory
        queries = np.zeros((my_rows, columns), np.float32)
        r = np.arange(my_row, min(my_row + my_rows, rows))
        if len(r):
            source = q + (n0 + r // H) * token_stride + r % H * head_stride
            for at, start, width in (
                (0, rank * g.value_columns, g.value_columns),
                (g.value_columns, D_V + rank * g.rope_columns, g.rope_columns),
            ):
                bits = memory.load_rows(source + 2 * start, 2 * width, QUERY_ALIGN).view(np.uint16)
                queries[: len(r), at : at + width] = widen(bits)
        return queries

    def score(stage: int, queries: Floats, me: int) -> Floats:
        """[16, my_rows] products over this block's columns; zero for an n8 tile that the warp does not have."""
        warp = current()
        active = MMA_N * active_tiles(g, me)
        keys = widen(warp.read(stage, np.uint16, (TILE, columns), g.row_stride))
        scores = np.zeros((TILE, my_rows), np.float32)
        scores[:, :active] = keys @ queries[:active].T
        return scores

    def clean_values(stage: int, me: int) -> None:
        """Sets values that are not finite to zero, for 0 * NaN is NaN: a share of the rows each, once all have scored."""
        warp = current()
        warp.sync(warp.block.named_barrier("score warps", g.score_warps))
        for token in range(me, TILE, g.score_warps):
            values = warp.write(stage + g.row_stride * token, np.uint16, (1, g.value_columns))
            values[(values & EXPONENT) == EXPONENT] = 0

    return {
        "load_q": load_q,
        "no_scores": lambda: np.zeros((TILE, my_rows), np.float32),
        "score": score,
        "clean_values": clean_values,
        "keep_first": keep_first,
        "keep_visible": keep_visible,
        **exchange_ops(g),
    }


def exchange_ops(g: Geometry) -> dict[str, Any]:
    """Partial scores to the partner block, and from it."""

    def my_place(tile: int, me: int) -> int:
        return tile + N8_BYTES * g.tiles_per_score_warp * me

    def send(scores: Floats, kept: int, exchange: int, bar: int, me: int, rank: int) -> None:
        """Announces the partner's bytes at the own `bar`, starts the write of the own ones to it and keeps them."""
        warp = current()
        partner = warp.cluster.blocks[1 - rank]
        active = active_tiles(g, me)
        tiles = np.ascontiguousarray(scores.reshape(TILE, -1, MMA_N).transpose(1, 0, 2)[:active])
        warp.write(my_place(kept, me), np.float32, tiles.shape)[:] = tiles
        data = tiles.view(np.uint8).reshape(active, N8_BYTES)
        warp.arrive_mbarrier(bar, data.nbytes)
        warp.write_async(partner, my_place(exchange, me), data.shape, lambda: data, partner.mbarrier(bar))

    def receive(kept: int, exchange: int, me: int) -> Floats:
        """Both blocks' columns added up."""
        warp = current()
        shape = (active_tiles(g, me), TILE, MMA_N)
        own, theirs = (warp.read(my_place(at, me), np.float32, shape).copy() for at in (kept, exchange))
        scores = np.zeros((TILE, g.tiles_per_score_warp, MMA_N), np.float32)
        scores[:, : len(own)] = (own + theirs).transpose(1, 0, 2)
        return scores.reshape(TILE, -1)

    return {"send": send, "receive": receive}
