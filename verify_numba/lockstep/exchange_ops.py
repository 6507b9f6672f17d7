"""Parts of scores on their way from score warps to the softmax warps of both blocks."""

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


def add_up(parts: list[Floats]) -> Floats:
    """The sum of the parts, in pairs of neighbours: the order in which a GPU adds them."""
    while len(parts) > 1:
        odd = parts[len(parts) - len(parts) % 2 :]
        parts = [x + y for x, y in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def exchange_ops(g: Geometry) -> dict[str, Any]:
    """A tile's scores lie as [n_tiles, 16, 8] float32; a group of row tiles is a run of them."""
    group_shape = (g.group_tiles, TILE, MMA_N)

    def group_place(scores: int, group: int) -> int:
        return scores + TILE_BYTES * g.group_tiles * group

    def by_row_tile(products: Floats) -> Floats:
        return np.ascontiguousarray(products.reshape(TILE, -1, MMA_N).transpose(1, 0, 2))

    def store_part(products: Floats, scores: int, group: int) -> None:
        current().write(group_place(scores, group), np.float32, group_shape)[:] = by_row_tile(products)

    def send_part(products: Floats, scores: int, bar: int, group: int, rank: int) -> None:
        """Starts the write to the partner block; the barrier there counts the bytes."""
        warp = current()
        partner = warp.cluster.blocks[1 - rank]
        data = by_row_tile(products).view(np.uint8).reshape(1, -1)
        warp.write_async(partner, group_place(scores, group), data.shape, data.copy, partner.mbarrier(bar))

    def arm_scores(bar: int, me: int) -> None:
        """Announces the partner's parts, in the first softmax warp."""
        if g.cluster == 2 and me == 0:
            current().arrive_mbarrier(bar, g.k_groups * g.score_bytes)

    def gather_scores(scores: int, partner: int, me: int) -> Floats:
        """[16, 8 * softmax_tiles], all parts of both blocks added up; zero for a row tile that there is not."""
        warp = current()
        first = g.softmax_tiles * me
        shape = (my_tiles(g, first), TILE, MMA_N)
        blocks = (scores, partner) if g.cluster == 2 else (scores,)
        sums = []
        for at in blocks:
            places = [at + g.score_bytes * part + TILE_BYTES * first for part in range(g.k_groups)]
            sums.append(add_up([warp.read(place, np.float32, shape).copy() for place in places]))
        # Each block's own parts first, so that both blocks have the same sums, bit for bit.
        tiles = add_up(sums)
        whole = np.zeros((TILE, g.softmax_tiles, MMA_N), np.float32)
        whole[:, : len(tiles)] = tiles.transpose(1, 0, 2)
        return whole.reshape(TILE, -1)

    return {
        "store_part": store_part,
        "send_part": send_part,
        "arm_scores": arm_scores,
        "gather_scores": gather_scores,
    }
