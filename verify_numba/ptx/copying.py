"""Slots to rows, rows to a stage of shared memory: one warp, asynchronously."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verify_numba.dims import D_V
from verify_numba.geometry import TILE, Geometry
from verify_numba.kernels.work import SLOTS_WIDE
from verify_numba.ptx.asm import I32, I64, VOID, asm, i32, i64, integer, lane_id, plus, tile_op, void
from verify_numba.ptx.control import device, lane, load_s32


@device
def load_slots(batch, request, first, last):
    """Lane l: the row number of tile first + l // 16, token l % 16; behind the end, the last one again."""
    tile = i32(min(first + (lane() >> 4), last - 1))
    token = i32(lane() & (TILE - 1))
    if tile < request.prefix_tiles:
        j = request.kv0 + min(TILE * tile + token, request.L - 1)
        # Little-endian: the low word of an int64 slot is the slot (a pool of 2^31 rows would be 2.4 TB).
        width = i32(4)
        if batch.widths & SLOTS_WIDE:
            width = i32(8)
        slot = load_s32(batch.kv_indices + j * width)
    else:
        slot = i32(request.n0 + min(TILE * (tile - request.prefix_tiles) + token, request.T - 1))
    return slot


LINE = 128
"""Bytes of a cache line."""


def copy_ops(g: Geometry) -> SimpleNamespace:
    value_bytes, rope_bytes = 2 * g.value_columns, 2 * g.rope_columns
    args = [i32, i32, i64, i64, i32, i32, i32]

    def row_address(b: Any, rows: Any, slot: Any, stride: Any) -> Any:
        # Volatile, so that the wait for the slot stands here, at its use, and not right behind its load.
        return asm(b, I64, "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", [slot, b.trunc(stride, I32), rows])

    def copy_rows_body(b: Any, stage: Any, full: Any, rows: Any, stride: Any, slots: Any, half: Any, rank: Any) -> None:
        """16 bytes a lane. A step copies one line of 128 bytes of four rows, so that a lane has few addresses: each of
        its steps is a constant distance from one of four."""
        me = lane_id(b)
        base = b.mul(half, integer(TILE))

        def copy_columns(lanes_a_row: int, width: int, at: int, source_at: int, source_step: int) -> None:
            """`width` bytes of every row, from byte `at` of a stage's row on."""
            row, chunk = b.udiv(me, integer(lanes_a_row)), b.mul(b.urem(me, integer(lanes_a_row)), integer(16))
            target = b.add(stage, b.add(b.mul(row, integer(g.row_stride)), chunk))
            source = b.add(rows, b.sext(b.add(chunk, b.mul(rank, integer(source_step))), I64))
            together = 32 // lanes_a_row
            for first in range(0, TILE, together):
                token = b.add(b.add(row, base), integer(first))
                slot = asm(b, I32, "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [slots, token])
                address = row_address(b, source, slot, stride)
                for line in range(0, width, 16 * lanes_a_row):
                    place, text = plus(first * g.row_stride + at + line), plus(source_at + line)
                    text = f"cp.async.cg.shared.global.L2::128B [$0{place}], [$1{text}], 16;"
                    asm(b, VOID, text, "r,l,~{memory}", [target, address])

        copy_columns(LINE // 16, value_bytes, 0, 0, value_bytes)
        copy_columns(rope_bytes // 16, rope_bytes, value_bytes, 2 * D_V, rope_bytes)
        asm(b, VOID, "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", "r,~{memory}", [full])

    return SimpleNamespace(load_slots=load_slots, copy_rows=tile_op(void, args, copy_rows_body))
