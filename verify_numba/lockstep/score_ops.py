"""Scores of a tile: queries, S = K Q^T, the exchange between the blocks of a cluster, the masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.dims import D_V
from verify_numba.geometry import MMA_N, TILE, Geometry
from verify_numba.kernels.work import CHAIN
from verify_numba.lockstep.bf16 import EXPONENT, widen
from verify_numba.lockstep.executor import Block, current
from verify_numba.lockstep.memory import POISON

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
        warp.preempt()
        active = MMA_N * active_tiles(g, me)
        keys = widen(warp.block.shared.view(stage, np.uint16, (TILE, columns), g.row_stride))
        scores = np.zeros((TILE, my_rows), np.float32)
        scores[:, :active] = keys @ queries[:active].T
        return scores

    def clean_values(stage: int, me: int) -> None:
        """Sets values that are not finite to zero, for 0 * NaN is NaN: a share of the rows each, once all have scored."""
        warp = current()
        warp.sync(warp.block.named_barrier("score warps", g.score_warps))
        values = warp.block.shared.view(stage, np.uint16, (TILE, g.value_columns), g.row_stride)[me :: g.score_warps]
        values[(values & EXPONENT) == EXPONENT] = 0
        warp.preempt()

    return {
        "load_q": load_q,
        "score": score,
        "clean_values": clean_values,
        "keep_first": keep_first,
        "keep_visible": keep_visible,
        **exchange_ops(g),
    }


def exchange_ops(g: Geometry) -> dict[str, Any]:
    """Partial scores to the partner block, and from it."""

    def slot(block: Block, exchange: int, me: int) -> Floats:
        """[active n8 tiles, 16, 8] of this warp in an exchange buffer."""
        shape = (active_tiles(g, me), TILE, MMA_N)
        return block.shared.view(exchange + N8_BYTES * g.tiles_per_score_warp * me, np.float32, shape)

    def send(scores: Floats, exchange: int, bar: int, me: int, rank: int) -> None:
        """Announces the partner's bytes at the own `bar`, and starts the write of the own ones to the partner."""
        warp = current()
        partner = warp.cluster.blocks[1 - rank]
        nbytes = N8_BYTES * active_tiles(g, me)
        own, theirs = warp.block.mbarrier(bar), partner.mbarrier(bar)
        own.expect(nbytes)
        own.arrive()
        target = slot(partner, exchange, me)
        data = np.stack(np.split(scores[:, : MMA_N * len(target)], len(target), axis=1))

        def land() -> None:
            target[:] = data

        warp.cluster.deliver(
            f"scores for {theirs.label}",
            partner,
            lambda: target.view(np.uint8).fill(POISON),
            land,
            lambda: theirs.complete(nbytes),
        )
        warp.preempt()

    def receive(scores: Floats, exchange: int, me: int) -> Floats:
        """Both blocks' columns added up."""
        warp = current()
        warp.preempt()
        whole = scores.copy()
        for n, tile in enumerate(slot(warp.block, exchange, me)):
            whole[:, MMA_N * n : MMA_N * (n + 1)] += tile
        return whole

    return {"send": send, "receive": receive}
