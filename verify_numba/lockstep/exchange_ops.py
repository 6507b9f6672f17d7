"""Parts of the scores on their way to the warp that owns their rows, here or in the partner block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.geometry import MMA_N, TILE, Geometry
from verify_numba.lockstep.machine import current
from verify_numba.lockstep.ownership import my_tiles, owned_count, owner_of

Floats = NDArray[np.float32]
PART_BYTES = 4 * TILE * MMA_N
"""One row tile of partial scores."""


def exchange_ops(g: Geometry) -> dict[str, Any]:
    def place(buffer: int, slot: int, row_tile: int) -> int:
        """Part number `slot` of a row tile in an exchange buffer, [16, 8] float32."""
        return buffer + PART_BYTES * (slot * g.n_tiles + row_tile)

    def zeros(tiles: int) -> Floats:
        return np.zeros((TILE, MMA_N * tiles), np.float32)

    def part_of(products: Floats, j: int) -> Floats:
        return products[:, MMA_N * j : MMA_N * (j + 1)]

    def send(products: Floats, buffer: int, bars: int, me: int, rank: int) -> None:
        """Starts the warp's parts on their way, and announces those from the partner at its own barrier.

        The barriers of the buffer begin at `bars`, one a score warp. A row tile goes to its owner in the
        partner block and, where that is another warp, to its owner in this one.
        """
        if g.cluster == 2:
            current().arrive_mbarrier(bars + 8 * me, PART_BYTES * g.k_groups * owned_count(g, me))
            send_to_partner(products, buffer, bars, me, rank)
        if g.k_groups > 1:
            send_here(products, buffer, bars, me)

    def send_to_partner(products: Floats, buffer: int, bars: int, me: int, rank: int) -> None:
        warp = current()
        partner = warp.cluster.blocks[1 - rank]
        slot = g.k_groups - 1 + me % g.k_groups
        for j, row_tile in enumerate(my_tiles(g, me)):
            data = np.ascontiguousarray(part_of(products, j)).view(np.uint8).reshape(1, PART_BYTES)
            at, bar = place(buffer, slot, row_tile), partner.mbarrier(bars + 8 * owner_of(g, row_tile))
            warp.write_async(partner, at, data.shape, data.copy, bar)

    def send_here(products: Floats, buffer: int, bars: int, me: int) -> None:
        warp = current()
        for j, row_tile in enumerate(my_tiles(g, me)):
            owner = owner_of(g, row_tile)
            if owner != me:
                at = place(buffer, me % g.k_groups - (me > owner), row_tile)
                warp.write(at, np.float32, (TILE, MMA_N))[:] = part_of(products, j)
        first = me // g.k_groups * g.k_groups
        for other in range(first, first + g.k_groups):
            if other != me:
                warp.arrive_mbarrier(bars + 8 * other)

    def own(products: Floats) -> Floats:
        """The warp's part of its own row tiles (the last may be one that it does not own)."""
        return products[:, : MMA_N * g.owned_tiles]

    def receive(scores: Floats, buffer: int, bars: int, parity: int, me: int) -> Floats:
        """Adds up all parts of the warp's own row tiles; zero for a tile that it does not own."""
        if g.exchange_slots == 0:
            return scores
        warp = current()
        warp.wait_mbarrier(bars + 8 * me, parity)
        whole = zeros(g.owned_tiles)
        for j, row_tile in enumerate(my_tiles(g, me)[: owned_count(g, me)]):
            total = part_of(scores, j)
            for slot in range(g.exchange_slots):
                total = total + warp.read(place(buffer, slot, row_tile), np.float32, (TILE, MMA_N))
            part_of(whole, j)[:] = total
        return whole

    return {
        "no_products": lambda: zeros(g.group_tiles),
        "no_scores": lambda: zeros(g.owned_tiles),
        "own": own,
        "send": send,
        "receive": receive,
        "owned_tile": lambda me: my_tiles(g, me)[0],
    }
