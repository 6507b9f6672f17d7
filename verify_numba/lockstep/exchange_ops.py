"""What the warps of a cluster hand one another: parts of scores to the block whose softmax warps want them, weights and
factors of rows to the value warps of both blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.geometry import MMA_N, TILE, WARP, Geometry
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


def send(place: int, data: NDArray[Any], bar: int) -> None:
    """Starts a write to the partner block; the barrier there counts the bytes. Both are in its shared memory."""
    warp = current()
    partner = warp.cluster.blocks[1 - warp.block.x % 2]
    sent = np.ascontiguousarray(data).view(np.uint8).reshape(1, -1)
    warp.write_async(partner, place, sent.shape, sent.copy, partner.mbarrier(bar))


def post(g: Geometry, place: int, data: NDArray[Any], bar: int) -> None:
    """Data to the shared memory of this block and, in a cluster, of the partner."""
    current().write(place, data.dtype, data.shape)[:] = data
    if g.cluster == 2:
        send(place, data, bar)


def add_up(parts: list[Floats]) -> Floats:
    """The sum of the parts, in pairs of neighbours: the order in which a GPU adds them."""
    while len(parts) > 1:
        odd = parts[len(parts) - len(parts) % 2 :]
        parts = [x + y for x, y in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def exchange_ops(g: Geometry) -> dict[str, Any]:
    """A tile's scores lie as [own_tiles, 16, 8] float32 in the block whose softmax it is."""

    def deliver(own_parity: int) -> Callable[[Floats, int, int, int, int], None]:
        """Row tiles of one parity to this block, of the other to the partner, whose barrier counts the bytes."""

        def deliver_tiles(products: Floats, own: int, partner: int, bar: int, first: int) -> None:
            for n, scores in enumerate(products.reshape(TILE, -1, MMA_N).transpose(1, 0, 2)):
                place = TILE_BYTES * ((first + n) // g.cluster)
                if g.cluster == 2 and n % 2 != own_parity:
                    send(partner + place, scores, bar)
                else:
                    current().write(own + place, np.float32, scores.shape)[:] = scores

        return deliver_tiles

    def arm_scores(bar: int, me: int, rank: int) -> None:
        """Announces the partner's parts, in the first softmax warp."""
        if g.cluster == 2 and me == 0:
            current().arrive_mbarrier(bar, g.k_groups * TILE_BYTES * len(tiles_of_block(g, rank)))

    def gather_scores(scores: int, partner: int, me: int, rank: int) -> Floats:
        """[16, 8 * softmax_tiles], all parts of both blocks added up; zero for a row tile that there is not."""
        warp = current()
        whole = np.zeros((TILE, g.softmax_tiles, MMA_N), np.float32)
        for n, tile in enumerate(tiles_of_warp(g, g.cluster * me + rank)):
            offset = TILE_BYTES * (tile // g.cluster)
            blocks = (scores, partner)[: g.cluster]
            places = [at + offset + g.score_bytes * part for at in blocks for part in range(g.k_groups)]
            whole[:, n] = add_up([warp.read(place, np.float32, (TILE, MMA_N)).copy() for place in places])
        return whole.reshape(TILE, -1)

    def post_note(note: int, factors: Floats, flag: int, my_tile: int, bar: int, reach: int) -> None:
        """A word of every lane: factors of the warp's rows [row tile, row % 2, row // 2], then the flag."""
        words = np.full((WARP // 8, 2, 4), flag, np.int32)
        words[: g.softmax_tiles] = factors.reshape(-1, 4, 2).transpose(0, 2, 1).view(np.int32)
        post(g, note + 4 * WARP * my_tile, words, bar)

    def post_weights(addr: int, p: Floats, my_tile: int, bar: int, reach: int) -> None:
        """bf16 [row tile, 16 tokens, 8 rows]."""
        bits = narrow(p).reshape(TILE, -1, MMA_N).transpose(1, 0, 2)
        for n, tile in enumerate(tiles_of_warp(g, my_tile)):
            post(g, addr + 2 * TILE * MMA_N * tile, bits[n], bar)

    def weights_from_partner(me: int, rank: int) -> int:
        """Bytes of weights that the partner block's warp of the same number sends."""
        return 2 * TILE * MMA_N * len(tiles_of_warp(g, g.cluster * me + 1 - rank))

    return {
        "deliver_even": deliver(0),
        "deliver_odd": deliver(1),
        "arm_scores": arm_scores,
        "gather_scores": gather_scores,
        "post_note": post_note,
        "post_weights": post_weights,
        "weights_from_partner": weights_from_partner,
    }
