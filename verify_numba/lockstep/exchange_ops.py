"""What the warps of a cluster hand one another: parts of scores to the block whose softmax warps want them, weights and
factors of rows to the value warps of both blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.geometry import MMA_N, TILE, Geometry
from verify_numba.lockstep.bf16 import narrow
from verify_numba.lockstep.machine import current

Floats = NDArray[np.float32]
TILE_BYTES = 4 * TILE * MMA_N
"""Scores of one row tile, [16, 8] float32."""


def tiles_of_warp(g: Geometry, my_tile: int) -> range:
    """Row tiles of the softmax warp whose first one is `my_tile`."""
    return range(my_tile, g.n_tiles, g.softmax_stride)


def tiles_of_block(g: Geometry, rank: int) -> range:
    """Row tiles whose softmax is block `rank`'s."""
    return range(rank, g.n_tiles, g.cluster)


def post(g: Geometry, place: int, data: NDArray[Any], bar: int) -> None:
    """Data to the shared memory of this block and of the partner, whose barrier counts the bytes."""
    warp = current()
    warp.write(place, data.dtype, data.shape)[:] = data
    if g.cluster == 2:
        partner = warp.cluster.blocks[1 - warp.block.x % 2]
        sent = data.copy().view(np.uint8).reshape(1, -1)
        warp.write_async(partner, place, sent.shape, sent.copy, partner.mbarrier(bar))


def add_up(parts: list[Floats]) -> Floats:
    """The sum of the parts, in pairs of neighbours: the order in which a GPU adds them."""
    while len(parts) > 1:
        odd = parts[len(parts) - len(parts) % 2 :]
        parts = [x + y for x, y in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def exchange_ops(g: Geometry) -> dict[str, Any]:
    """A tile's scores lie as [own_tiles, 16, 8] float32 in the block whose softmax it is."""

    def deliver(
        products: Floats, own: int, partner_place: int, bar: int, reach: int, group: int, rank: int
    ) -> None:
        """Each row tile to the block that it is for; the barrier of the partner counts the bytes."""
        warp = current()
        partner = warp.cluster.blocks[1 - rank] if g.cluster == 2 else warp.block
        first = g.group_tiles * group
        for n, scores in enumerate(products.reshape(TILE, -1, MMA_N).transpose(1, 0, 2)):
            place = TILE_BYTES * ((first + n) // g.cluster)
            if (first + n) % g.cluster == rank:
                warp.write(own + place, np.float32, (TILE, MMA_N))[:] = scores
            else:
                sent = np.ascontiguousarray(scores).view(np.uint8).reshape(1, -1)
                warp.write_async(partner, partner_place + place, sent.shape, sent.copy, partner.mbarrier(bar))

    def arm_scores(bar: int, me: int, rank: int) -> None:
        """Announces the partner's parts, in the first softmax warp."""
        if g.cluster == 2 and me == 0:
            current().arrive_mbarrier(bar, g.k_groups * TILE_BYTES * len(tiles_of_block(g, rank)))

    def gather_scores(scores: int, partner: int, me: int, rank: int) -> Floats:
        """[16, 8 * softmax_tiles], all parts of both blocks added up; zero for a row tile that there is not."""
        warp = current()
        tiles = tiles_of_warp(g, g.cluster * me + rank)
        blocks = (scores, partner) if g.cluster == 2 else (scores,)
        whole = np.zeros((TILE, g.softmax_tiles, MMA_N), np.float32)
        for n, tile in enumerate(tiles):
            places = [at + TILE_BYTES * (tile // g.cluster) for at in blocks]
            sums = []
            for at in places:
                parts = [at + g.score_bytes * part for part in range(g.k_groups)]
                sums.append(add_up([warp.read(part, np.float32, (TILE, MMA_N)).copy() for part in parts]))
            whole[:, n] = add_up(sums)
        return whole.reshape(TILE, -1)

    def post_note(note: int, factors: Floats, flag: int, my_tile: int, bar: int, reach: int) -> None:
        """A factor of each row of the warp, and whether it differs from one."""
        for n, tile in enumerate(tiles_of_warp(g, my_tile)):
            post(g, note + 4 * MMA_N * tile, factors[MMA_N * n : MMA_N * (n + 1)], bar)
        post(g, note + 4 * g.rows + 8 * my_tile, np.array([flag, 0], np.int32), bar)

    def post_weights(addr: int, p: Floats, my_tile: int, bar: int, reach: int) -> None:
        """bf16 [row tile, 16 tokens, 8 rows]."""
        bits = narrow(p).reshape(TILE, -1, MMA_N).transpose(1, 0, 2)
        for n, tile in enumerate(tiles_of_warp(g, my_tile)):
            post(g, addr + 2 * TILE * MMA_N * tile, bits[n], bar)

    def from_partner(tile_bytes: int) -> Callable[[int, int], int]:
        """Bytes that the partner block's warp of the same number sends: for each of its row tiles, and a flag."""
        return lambda me, rank: tile_bytes * len(tiles_of_warp(g, g.cluster * me + 1 - rank)) + 8

    return {
        "deliver": deliver,
        "arm_scores": arm_scores,
        "gather_scores": gather_scores,
        "post_note": post_note,
        "post_weights": post_weights,
        "note_from_partner": from_partner(4 * MMA_N),
        "weights_from_partner": from_partner(4 * MMA_N + 2 * TILE * MMA_N),
    }
