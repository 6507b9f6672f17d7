"""Scores on their way: between the score warps of a group, to softmax warps, to the partner block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.geometry import MMA_N, TILE, Geometry
from verify_numba.lockstep.machine import current

Floats = NDArray[np.float32]
TILE_BYTES = 4 * TILE * MMA_N
"""Scores of one row tile, [16, 8] float32."""


def my_tiles(g: Geometry, my_tile: int) -> int:
    """Row tiles of the softmax warp whose first one is `my_tile`; the last warp may have fewer."""
    return min(g.softmax_tiles, g.n_tiles - my_tile)


def exchange_ops(g: Geometry) -> dict[str, Any]:
    """A tile's scores lie as [n_tiles, 16, 8] float32; a group of row tiles is a run of them."""
    group_shape = (g.group_tiles, TILE, MMA_N)

    def group_place(scores: int, group: int) -> int:
        return scores + TILE_BYTES * g.group_tiles * group

    def by_row_tile(products: Floats) -> Floats:
        return np.ascontiguousarray(products.reshape(TILE, -1, MMA_N).transpose(1, 0, 2))

    def from_row_tiles(tiles: Floats) -> Floats:
        return tiles.transpose(1, 0, 2).reshape(TILE, -1)

    def add_part(products: Floats, relay: int, group: int) -> Floats:
        """The products and what the warp of the share before left."""
        before = current().read(group_place(relay, group), np.float32, group_shape)
        added: Floats = products + from_row_tiles(before)
        return added

    def store_part(products: Floats, scores: int, group: int) -> None:
        current().write(group_place(scores, group), np.float32, group_shape)[:] = by_row_tile(products)

    def send_part(products: Floats, scores: int, bar: int, group: int, rank: int) -> None:
        """Starts the write to the partner block; the barrier there counts the bytes."""
        warp = current()
        partner = warp.cluster.blocks[1 - rank]
        data = by_row_tile(products).view(np.uint8).reshape(1, -1)
        warp.write_async(partner, group_place(scores, group), data.shape, data.copy, partner.mbarrier(bar))

    def arm_scores(bar: int) -> None:
        """Announces the partner's part."""
        if g.cluster == 2:
            current().arrive_mbarrier(bar, g.score_bytes)

    def gather_scores(scores: int, partner: int, me: int) -> Floats:
        """[16, 8 * softmax_tiles], both blocks' parts added up; zero for a row tile that there is not."""
        warp = current()
        first = g.softmax_tiles * me
        shape = (my_tiles(g, first), TILE, MMA_N)
        tiles = warp.read(scores + TILE_BYTES * first, np.float32, shape).copy()
        if g.cluster == 2:
            tiles += warp.read(partner + TILE_BYTES * first, np.float32, shape)
        whole = np.zeros((TILE, g.softmax_tiles, MMA_N), np.float32)
        whole[:, : len(tiles)] = tiles.transpose(1, 0, 2)
        return whole.reshape(TILE, -1)

    return {
        "add_part": add_part,
        "store_part": store_part,
        "send_part": send_part,
        "arm_scores": arm_scores,
        "gather_scores": gather_scores,
    }
