"""Who does what: the batch as a kernel sees it, and the walk over requests that every role shares.

All key tiles of all requests stand in one line; a worker owns the tiles `[begin, end)` of it. Requests are visited in
order, and a role does its part of each request's tiles that fall into its share.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

from verify_numba.geometry import TILE

PREFIX, TAIL = 1, 2
"""Bits of `Batch.parts`."""
FULL_MASK, QLEN_ONLY, CHAIN = 0, 1, 2
"""Values of `Batch.layout`."""
QO_WIDE, KV_WIDE, SLOTS_WIDE, MASK_WIDE = 1, 2, 4, 8
"""Bits of `Batch.widths`: which index arrays are int64."""

Batch = namedtuple(
    "Batch", "bs H parts layout widths min_tiles qo_indptr kv_indptr kv_indices mask mask_indptr"
)
"""The batch: pointers to its index arrays, and what is the same for every block."""

Block = namedtuple("Block", "worker workers rank row0 base")
"""One block: its worker, how many there are, its rank in the cluster, its first query row, its shared memory."""

Share = namedtuple("Share", "b start begin end")
"""The tiles `[begin, end)` are left to do; request `b`'s first tile is number `start`."""

Request = namedtuple("Request", "n0 T kv0 L prefix_tiles tiles")
"""First draft token, draft tokens, first entry of kv_indices, prefix length, tiles of the prefix, tiles in all."""


def make_step(ops: Any) -> Any:
    """The function `step(place, parity, length)`."""
    i32 = ops.i32

    @ops.device
    def step(place, parity, length):
        """The next place of a ring, and the parity of the round that it is in."""
        place = i32(place + 1)
        if place == length:
            place, parity = i32(0), i32(parity ^ 1)
        return place, parity

    return step


def make_walk(ops: Any) -> tuple[Any, Any, Any]:
    """The functions `request(batch, b)`, `stop(share, request)` and `after(share, request)`."""
    i32, load_count = ops.i32, ops.load_count

    @ops.device
    def request(batch, b):
        # Four loads with nothing between them, so that they share one latency.
        n0 = load_count(batch.qo_indptr, b, batch.widths & QO_WIDE)
        n1 = load_count(batch.qo_indptr, b + 1, batch.widths & QO_WIDE)
        kv0 = load_count(batch.kv_indptr, b, batch.widths & KV_WIDE)
        kv1 = load_count(batch.kv_indptr, b + 1, batch.widths & KV_WIDE)
        T, L = i32(n1 - n0), i32(kv1 - kv0)
        prefix_tiles = i32(0)
        if batch.parts & PREFIX and T > 0:
            prefix_tiles = i32((L + (TILE - 1)) // TILE)
        tiles = prefix_tiles
        if batch.parts & TAIL:
            tiles = i32(tiles + (T + (TILE - 1)) // TILE)
        return Request(n0, T, kv0, L, prefix_tiles, tiles)

    @ops.device
    def stop(share, request):
        """Where this worker's tiles of the request end."""
        return i32(min(share.end, i32(share.start + request.tiles)))

    @ops.device
    def after(share, request):
        """The share once the request is done."""
        return Share(
            i32(share.b + 1), i32(share.start + request.tiles), stop(share, request), share.end
        )

    return request, stop, after
