"""The merge kernel's operations: parts in the accumulator layout, each row's log-sum-exp beside it (in base 2).

A part tile is (m0, m1, l0, l1, o[8]): maximum and sum of the lane's two rows, and its eight values of O.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from verify_numba.dims import D_V
from verify_numba.geometry import COLUMN_GROUP
from verify_numba.kernels.merge_kernel import MERGE_AHEAD, MERGE_WARPS, PART_WORDS
from verify_numba.ptx.asm import (
    F32,
    I32,
    VOID,
    asm,
    asm_many,
    const,
    ex2,
    f32,
    fma,
    fmax,
    i32,
    i64,
    instruction,
    integer,
    lane_id,
    lg2,
    load_shared,
    store_shared,
    tile,
    tile_op,
    unpack,
    void,
    wide,
)
from verify_numba.ptx.control import block_x, device, lane, load_count, request_span, row_block, shared_base, warp_id
from verify_numba.ptx.softmax import FLT_MAX

part_t = tile(f32, PART_WORDS)
merged_t = tile(f32, 2)
"""(value, log2-sum-exp) of one element: warp w of the merge owns element w of every lane."""

TILE_BYTES = 8 * D_V * 4
GROUP_BYTES = 8 * COLUMN_GROUP * 4


def _combine(b: Any, state: list[Any], lse: list[Any], values: list[Any]) -> list[Any]:
    m, sums, o = state[:2], state[2:4], state[4:]
    top = [fmax(b, x, y) for x, y in zip(m, lse, strict=True)]
    old = [ex2(b, b.fsub(x, y)) for x, y in zip(m, top, strict=True)]
    new = [ex2(b, b.fsub(x, y)) for x, y in zip(lse, top, strict=True)]
    sums = [fma(b, x, s, y) for x, s, y in zip(sums, old, new, strict=True)]
    o = [fma(b, x, old[e % 2], b.fmul(v, new[e % 2])) for e, (x, v) in enumerate(zip(o, values, strict=True))]
    return [*top, *sums, *o]


def _load_part(b: Any, lse_at: Any, o_at: Any, flag: Any) -> tuple[list[Any], list[Any]]:
    """A part's two log-sum-exps and eight values; -inf and 0 where the flag is not set."""
    low = "0fFF800000"
    text = (
        f"{{.reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, {low}; mov.b32 $1, {low}; "
        "@p ld.global.v2.f32 {$0,$1}, [$2];}"
    )
    lse = asm_many(b, F32, 2, text, "=&f,=&f,l,r", [lse_at, flag])
    values = []
    for half in range(2):
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
        text = (
            f"{{.reg .pred p; setp.ne.s32 p, $5, 0; {zeros} "
            f"@p ld.global.v4.f32 {{$0,$1,$2,$3}}, [$4+{512 * half}];}}"
        )
        values += asm_many(b, F32, 4, text, "=&f,=&f,=&f,=&f,l,r", [o_at, flag])
    return lse, values


def _merge_part(b: Any, part: Any, lse_at: Any, lse_step: Any, o_at: Any, o_step: Any, left: Any) -> list[Any]:
    """`left` parts remain; those that this warp takes next are `MERGE_WARPS` apart."""
    loads = []
    for i in range(MERGE_AHEAD):
        flag = b.zext(b.icmp_signed(">", left, integer(i * MERGE_WARPS)), I32)
        loads.append(_load_part(b, b.add(lse_at, b.mul(lse_step, wide(i))), b.add(o_at, b.mul(o_step, wide(i))), flag))
    state = unpack(b, part, PART_WORDS)
    for lse, values in loads:
        state = _combine(b, state, lse, values)
    return state


_merge_at = tile_op(part_t, [part_t, i64, i64, i64, i64, i32], _merge_part)


@device
def merge_part(part, part_o, part_lse, row_capacity, slot0, p, count, row_tile, group):
    row = i64(slot0 + p) * row_capacity + 8 * row_tile
    lse_at = part_lse + 4 * (row + 2 * (lane() & 3))
    o_at = part_o + (row // 8) * TILE_BYTES + group * GROUP_BYTES + 16 * lane()
    step = i64(MERGE_WARPS) * row_capacity
    return _merge_at(part, lse_at, 4 * step, o_at, (step // 8) * TILE_BYTES, i32(count - p))


def _stage_parts(b: Any, base: Any, warp: Any, part: Any) -> None:
    at = b.add(base, b.mul(b.add(b.mul(warp, integer(32)), lane_id(b)), integer(4 * PART_WORDS)))
    values = unpack(b, part, PART_WORDS)
    for i in range(0, PART_WORDS, 4):
        store_shared(b, at, 4 * i, values[i : i + 4])
    asm(b, VOID, f"bar.sync 0, {32 * MERGE_WARPS};", "~{memory}", [])


def _merge_staged(b: Any, base: Any, warp: Any) -> list[Any]:
    lanes = b.add(base, b.mul(lane_id(b), integer(4 * PART_WORDS)))
    row = b.add(lanes, b.mul(b.and_(warp, integer(1)), integer(4)))
    element = b.add(lanes, b.add(b.mul(warp, integer(4)), integer(16)))
    size = 32 * 4 * PART_WORDS
    m = [load_shared(b, row, i * size, 1)[0] for i in range(MERGE_WARPS)]
    sums = [load_shared(b, row, i * size + 8, 1)[0] for i in range(MERGE_WARPS)]
    o = [load_shared(b, element, i * size, 1)[0] for i in range(MERGE_WARPS)]
    top = m[0]
    for x in m[1:]:
        top = fmax(b, top, x)
    total, value = const(0.0), const(0.0)
    for x, s, v in zip(m, sums, o, strict=True):
        weight = ex2(b, b.fsub(x, top))
        total, value = fma(b, s, weight, total), fma(b, v, weight, value)
    empty = b.fcmp_ordered("==", total, const(0.0))
    lse = b.select(empty, const(float("-inf")), b.fadd(top, lg2(b, total)))
    return [b.select(empty, const(0.0), b.fdiv(value, total)), lse]


_stage_at = tile_op(void, [i32, i32, part_t], _stage_parts)
_merge_staged_at = tile_op(merged_t, [i32, i32], _merge_staged)
_store_bf16 = instruction(
    void, [i64, f32], "{.reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h;}", "l,f,~{memory}"
)
_store_f32 = instruction(void, [i64, f32], "st.global.f32 [$0], $1;", "l,f,~{memory}")
LN_2 = math.log(2.0)


@device
def stage_parts(part):
    _stage_at(shared_base(), warp_id(), part)


@device
def merge_staged():
    return _merge_staged_at(shared_base(), warp_id())


@device
def store_merged(merged, out, lse, row_offset, row_tile, group, rows):
    e = warp_id()
    row = i32(8 * row_tile + 2 * (lane() & 3) + (e & 1))
    column = i32(COLUMN_GROUP * group + 16 * (e >> 2) + 8 * ((e >> 1) & 1) + (lane() >> 2))
    if row < rows:
        _store_bf16(out + 2 * ((i64(row_offset) + row) * D_V + column), merged[0])
        if lse != 0 and group == 0 and e < 2 and lane() < 4:
            _store_f32(lse + 4 * (i64(row_offset) + row), f32(merged[1] * LN_2))


def merge_ops(overlap: bool) -> SimpleNamespace:
    """`overlap`: the launch may start before the kernel ahead of it ends (compute capability 9.0 and newer)."""
    empty = [const(-FLT_MAX)] * 2 + [const(0.0)] * (PART_WORDS - 2)
    return SimpleNamespace(
        device=device, i32=i32, warp_id=warp_id, block_x=block_x, row_block=row_block, load_count=load_count,
        request_span=request_span,
        after_previous=instruction(void, [], "griddepcontrol.wait;" if overlap else "", "~{memory}"),
        empty_part=tile_op(part_t, [], lambda b: list(empty)),
        merge_part=merge_part, stage_parts=stage_parts, merge_staged=merge_staged, store_merged=store_merged,
    )  # fmt: skip
