"""From slots to stages: which rows of memory hold a tile's tokens, and their copy to shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.dims import D_V
from verify_numba.geometry import TILE, WARP, Geometry
from verify_numba.kernels.work import SLOTS_WIDE, Batch, Request
from verify_numba.lockstep.machine import current
from verify_numba.lockstep.memory import Bytes

LANE = np.arange(WARP)
COPY_ALIGN = 16
"""Of source and destination of an asynchronous copy."""

Slots = NDArray[np.int64]


def load_slots(batch: Batch, request: Request, first_tile: int, last_tile: int) -> Slots:
    """[32] rows: lane l has token l % 16 of tile `first_tile + l // 16`, or of the last tile.

    A prefix tile's rows are in the pool, a tail tile's among the draft latents. Tokens behind the end repeat
    the last.
    """
    memory = current().memory
    tile = np.minimum(first_tile + LANE // TILE, last_tile - 1)
    token = TILE * tile + LANE % TILE
    tail_token = token - TILE * request.prefix_tiles
    slots: Slots = request.n0 + np.minimum(tail_token, request.T - 1)
    in_prefix = tile < request.prefix_tiles
    if in_prefix.any():
        kind = np.dtype(np.int64 if batch.widths & SLOTS_WIDE else np.int32)
        entry = request.kv0 + np.minimum(token[in_prefix], request.L - 1)
        found = memory.load_rows(batch.kv_indices + kind.itemsize * entry, kind.itemsize, kind.itemsize)
        slots[in_prefix] = found.view(kind).ravel()
    return slots


def copy_ops(g: Geometry) -> dict[str, Any]:
    value_bytes, rope_bytes = 2 * g.value_columns, 2 * g.rope_columns

    def copy_rows(stage: int, full: int, rows: int, stride: int, slots: Slots, half: int, rank: int) -> None:
        """Starts the copy of this block's columns of 16 rows, which ends with the barrier `full`."""
        warp = current()
        memory = warp.memory
        source = rows + slots[TILE * half : TILE * (half + 1)] * stride
        value, rope = source + rank * value_bytes, source + 2 * D_V + rank * rope_bytes
        memory.check_rows(value, value_bytes, COPY_ALIGN)
        memory.check_rows(rope, rope_bytes, COPY_ALIGN)

        def fetch() -> Bytes:
            columns = ((value, value_bytes), (rope, rope_bytes))
            return np.concatenate(
                [memory.load_rows(at, nbytes, COPY_ALIGN) for at, nbytes in columns], axis=1
            )

        # The copies of each lane end with one arrival.
        warp.write_async(
            warp.block,
            stage,
            (TILE, value_bytes + rope_bytes),
            fetch,
            warp.block.mbarrier(full),
            stride=g.row_stride,
            arrivals=WARP,
        )

    return {"load_slots": load_slots, "copy_rows": copy_rows}
