"""Parts of the scores on their way from score warps to softmax warps, here and in the partner block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.geometry import MMA_N, TILE, Geometry
from verify_numba.lockstep.machine import Block, current

Floats = NDArray[np.float32]
TILE_BYTES = 4 * TILE * MMA_N
"""Partial scores of one row tile."""


def my_tiles(g: Geometry, my_tile: int) -> int:
    """Row tiles of the softmax warp whose first one is `my_tile`; the last warp may have fewer."""
    return min(g.softmax_tiles, g.n_tiles - my_tile)


def exchange_ops(g: Geometry) -> dict[str, Any]:
    part_bytes = TILE_BYTES * g.n_tiles

    def partner_of(rank: int) -> Block:
        return current().cluster.blocks[1 - rank]

    def send(products: Floats, scores: int, bar: int, group: int, part: int, rank: int) -> None:
        """Part `part` of the sum to this block, part `k_groups + part` to the partner; both bars are told."""
        warp = current()
        tiles = np.ascontiguousarray(products.reshape(TILE, -1, MMA_N).transpose(1, 0, 2))
        here = scores + part_bytes * part + TILE_BYTES * g.group_tiles * group
        if g.cluster == 2:
            there = partner_of(rank)
            data = tiles.view(np.uint8).reshape(1, -1)
            at = here + part_bytes * g.k_groups
            warp.write_async(there, at, data.shape, data.copy, there.mbarrier(bar))
        warp.write(here, np.float32, tiles.shape)[:] = tiles
        warp.arrive_mbarrier(bar)

    def arm_scores(bar: int) -> None:
        """Announces the partner's parts."""
        if g.cluster == 2:
            current().arrive_mbarrier(bar, part_bytes * g.k_groups)

    def gather_scores(scores: int, me: int) -> Floats:
        """[16, 8 * softmax_tiles], all parts added up in pairs; zero for a row tile that there is not."""
        warp = current()
        first = g.softmax_tiles * me
        shape = (my_tiles(g, first), TILE, MMA_N)
        at = scores + TILE_BYTES * first
        parts = [warp.read(at + part_bytes * p, np.float32, shape).copy() for p in range(g.score_parts)]
        while len(parts) > 1:
            pairs = [x + y for x, y in zip(parts[::2], parts[1::2], strict=False)]
            parts = pairs + parts[len(parts) - len(parts) % 2 :]
        whole = np.zeros((TILE, g.softmax_tiles, MMA_N), np.float32)
        whole[:, : shape[0]] = parts[0].transpose(1, 0, 2)
        return whole.reshape(TILE, -1)

    def release_scores(bar: int, rank: int) -> None:
        """The buffer is read: tells the score warps of this block and of the partner."""
        current().arrive_mbarrier(bar)
        if g.cluster == 2:
            current().arrive_remote(partner_of(rank), bar)

    return {
        "send": send,
        "arm_scores": arm_scores,
        "gather_scores": gather_scores,
        "release_scores": release_scores,
    }
