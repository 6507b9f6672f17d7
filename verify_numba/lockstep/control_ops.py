"""Where a warp is, the barriers of a block, and the division of the batch's tiles among workers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.geometry import EXCHANGE_BUFFERS, TILE, VALUE_WARPS, WARP, WEIGHT_BUFFERS, Geometry
from verify_numba.kernels.work import KV_WIDE, PREFIX, QO_WIDE, TAIL, Batch, Share
from verify_numba.lockstep.barriers import CountedBarrier
from verify_numba.lockstep.machine import current
from verify_numba.lockstep.memory import GlobalMemory


def i32(value: int) -> int:
    """The value, which must fit 32 bits: on a GPU it would wrap in silence."""
    if not -(2**31) <= value < 2**31:
        raise OverflowError(f"{value} does not fit int32")
    return int(value)


def load_index(ptr: int, i: int, wide: int) -> int:
    """Element `i` of an index array, int64 if `wide`, else int32."""
    size = 8 if wide else 4
    data = current().memory.bytes(ptr + size * i, size, size)
    return int.from_bytes(data.tobytes(), "little", signed=True)


def load_indices(memory: GlobalMemory, ptr: int, count: int, wide: int) -> NDArray[np.int64]:
    """The first `count` elements of an index array."""
    return memory.load(ptr, np.int64 if wide else np.int32, count).astype(np.int64)


def _tiles(batch: Batch) -> NDArray[np.int64]:
    """[bs] key tiles of each request, the same sum as `request` in kernels/work.py; taken once a launch."""
    known = current().cluster.dispatch.known
    if batch not in known:
        known[batch] = _count_tiles(batch, current().memory)
    return known[batch]


def _count_tiles(batch: Batch, memory: GlobalMemory) -> NDArray[np.int64]:
    T = np.diff(load_indices(memory, batch.qo_indptr, batch.bs + 1, batch.widths & QO_WIDE))
    tiles = np.zeros_like(T)
    if batch.parts & PREFIX:
        L = np.diff(load_indices(memory, batch.kv_indptr, batch.bs + 1, batch.widths & KV_WIDE))
        tiles += np.where(T > 0, (L + TILE - 1) // TILE, 0)
    if batch.parts & TAIL:
        tiles += (T + TILE - 1) // TILE
    return tiles


def _quota(batch: Batch, total: int, workers: int) -> int:
    """Tiles of one worker."""
    return i32(max(batch.min_tiles, -(-total // workers)))


def first_share(batch: Batch, worker: int, workers: int) -> Share:
    """The worker's part of the line of all tiles, and the request it starts in."""
    ends = np.cumsum(_tiles(batch))
    total = i32(int(ends[-1])) if batch.bs else 0
    quota = _quota(batch, total, workers)
    begin = min(total, worker * quota)
    end = min(total, begin + quota)
    b = int(np.searchsorted(ends, begin, side="right")) if begin < end else 0
    return Share(b, int(ends[b - 1]) if b else 0, begin, end)


def request_span(batch: Batch, b: int, workers: int) -> tuple[int, int]:
    """The first worker that has tiles of request `b`, and how many workers do."""
    tiles = _tiles(batch)
    if not tiles[b]:
        return 0, 0
    quota = _quota(batch, i32(int(tiles.sum())), workers)
    start = int(tiles[:b].sum())
    first = start // quota
    return first, (start + int(tiles[b]) - 1) // quota - first + 1


def share_ops(g: Geometry) -> dict[str, Any]:
    """The block's share of the work, found by one warp and left in shared memory for the others."""

    def store_share(base: int, share: Share) -> None:
        current().write(base + g.shared.share, np.int32, (4,))[:] = share

    def load_share(base: int) -> Share:
        return Share(*current().read(base + g.shared.share, np.int32, (4,)).tolist())

    return {"first_share": first_share, "store_share": store_share, "load_share": load_share}


def place_ops(g: Geometry) -> dict[str, Any]:
    """Identity and arithmetic: what needs no barrier."""
    return {
        "device": lambda function: function,
        "i32": i32,
        "warp_id": lambda: current().index,
        "shared_base": lambda: 0,
        "block_x": lambda: current().block.x,
        "row_block": lambda: current().block.y,
        "row_blocks": lambda: current().cluster.dispatch.grid[1],
        "cluster_id": lambda: current().block.x // g.cluster,
        "cluster_count": lambda: current().cluster.dispatch.grid[0] // g.cluster,
        "cluster_rank": lambda: current().block.x % g.cluster,
        "load_index": load_index,
        "request_span": request_span,
        "release_next": lambda: None,
        "after_previous": lambda: None,
    }


def barrier_ops(g: Geometry) -> dict[str, Any]:
    """Barriers: set up, waited for and arrived at by whole warps."""
    at = g.shared
    # The other warps of the row group, and the owner itself, which announces the partner's bytes.
    exchange_arrivals = g.k_groups - 1 + (g.cluster == 2)

    def init_barriers(base: int) -> None:
        rings = (
            ("full", at.full, g.stages, 1 if g.bulk else WARP),
            ("empty", at.empty, g.stages, VALUE_WARPS),
            ("weights_full", at.weights_full, WEIGHT_BUFFERS, g.score_warps),
            ("weights_empty", at.weights_empty, WEIGHT_BUFFERS, VALUE_WARPS),
            ("inverse_full", at.inverse_full, 1, g.score_warps),
            ("inverse_empty", at.inverse_empty, 1, VALUE_WARPS),
            ("exchange_full", at.exchange_full, EXCHANGE_BUFFERS * g.score_warps, exchange_arrivals),
        )
        block = current().block
        for name, offset, length, count in rings:
            for i in range(length if count else 0):
                block.init_mbarrier(base + offset + 8 * i, count, f"{name}[{i}]")

    def all_warps() -> CountedBarrier:
        warp = current()
        return warp.cluster.all_warps if g.cluster == 2 else warp.block.all_warps

    def announce() -> None:
        current().arrive(all_warps())

    def await_start() -> None:
        current().sync(all_warps())

    def settle() -> None:
        if g.cluster == 2:
            current().wait_phase(all_warps(), 0)

    def finish() -> None:
        if g.cluster == 2:
            current().sync(all_warps())

    def wait(bar: int, parity: int) -> None:
        current().wait_mbarrier(bar, parity)

    def arrive(bar: int) -> None:
        current().arrive_mbarrier(bar)

    return {
        "init_barriers": init_barriers,
        "announce": announce,
        "await_start": await_start,
        "settle": settle,
        "finish": finish,
        "wait": wait,
        "arrive": arrive,
    }
