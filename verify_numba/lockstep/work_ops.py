"""The division of the batch's key tiles among workers, from the index arrays in global memory."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.geometry import TILE
from verify_numba.kernels.work import KV_WIDE, PREFIX, QO_WIDE, TAIL, Batch, Share
from verify_numba.lockstep.machine import current


def i32(value: int) -> int:
    """The value, which must fit 32 bits: on a GPU it would wrap in silence."""
    if not -(2**31) <= value < 2**31:
        raise OverflowError(f"{value} does not fit int32")
    return int(value)


def load_index(ptr: int, i: int, wide: int) -> int:
    """Element `i` of an index array, int64 if `wide`, else int32; read once a launch."""
    warp = current()
    key, known = (ptr, i, wide), warp.cluster.dispatch.known
    if key not in known:
        known[key] = int(warp.memory.load(ptr + (8 if wide else 4) * i, _dtype(wide), 1)[0])
    return int(known[key])


def load_count(ptr: int, i: int, wide: int) -> int:
    """The same, of an array whose elements all fit 32 bits."""
    return i32(load_index(ptr, i, wide))


def first_share(batch: Batch, worker: int, workers: int) -> Share:
    """The worker's part of the line of all tiles, and the request it starts in."""
    starts = _starts(batch)
    total = i32(starts[-1])
    quota = _quota(batch, total, workers)
    begin = min(total, worker * quota)
    end = min(total, begin + quota)
    b = bisect_right(starts, begin) - 1 if begin < end else 0
    return Share(b, starts[b], begin, end)


def request_span(batch: Batch, b: int, workers: int) -> tuple[int, int]:
    """The first worker that has tiles of request `b`, and how many workers do."""
    starts = _starts(batch)
    start, stop = starts[b], starts[b + 1]
    if start == stop:
        return 0, 0
    quota = _quota(batch, i32(starts[-1]), workers)
    return start // quota, (stop - 1) // quota - start // quota + 1


def work_ops() -> dict[str, Any]:
    return {
        "i32": i32,
        "load_index": load_index,
        "load_count": load_count,
        "first_share": first_share,
        "request_span": request_span,
    }


def _dtype(wide: int) -> type[np.int64 | np.int32]:
    return np.int64 if wide else np.int32


def _quota(batch: Batch, total: int, workers: int) -> int:
    """Tiles of one worker."""
    return i32(max(batch.min_tiles, -(-total // workers)))


def _starts(batch: Batch) -> list[int]:
    """[bs + 1] where the tiles of each request begin in the line of all tiles; counted once a launch."""
    known = current().cluster.dispatch.known
    if batch not in known:
        known[batch] = [0, *np.cumsum(_tiles(batch)).tolist()]
    starts: list[int] = known[batch]
    return starts


def _tiles(batch: Batch) -> NDArray[np.int64]:
    """[bs] key tiles of each request, the same sum as `request` in kernels/work.py."""
    T = _lengths(batch, batch.qo_indptr, batch.widths & QO_WIDE)
    tiles = np.zeros_like(T)
    if batch.parts & PREFIX:
        L = _lengths(batch, batch.kv_indptr, batch.widths & KV_WIDE)
        tiles += np.where(T > 0, (L + TILE - 1) // TILE, 0)
    if batch.parts & TAIL:
        tiles += (T + TILE - 1) // TILE
    return tiles


def _lengths(batch: Batch, indptr: int, wide: int) -> NDArray[np.int64]:
    ends = current().memory.load(indptr, _dtype(wide), batch.bs + 1).astype(np.int64)
    lengths: NDArray[np.int64] = ends[1:] - ends[:-1]
    return lengths
