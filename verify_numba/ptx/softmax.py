"""Online softmax over score fragments. Lane (g, t) holds tokens g, g + 8 of query rows 2t, 2t + 1 of each n8 tile.

Per-row state (`m`, sums, alpha) is a tile of two values an n8 tile, equal in the eight lanes of a row except for the
sums, which stay per lane until the end. `m` starts at -FLT_MAX, the identity of max over finite floats: no score lies
below it, and the subtraction in `exponents` never meets inf - inf.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from numba import float32

from verify_numba.geometry import GROWTH, Geometry
from verify_numba.ptx.asm import (
    F32,
    I32,
    VOID,
    add,
    any_lane,
    asm,
    const,
    ex2,
    f32,
    fma,
    fmax,
    i32,
    i64,
    integer,
    lane_id,
    less,
    lg2,
    over_tokens,
    pack_bf16,
    store_shared,
    tile,
    tile_op,
    unpack,
    void,
    wide,
)
from verify_numba.ptx.control import device

FLT_MAX = 3.4028234663852886e38


def softmax_ops(g: Geometry) -> SimpleNamespace:
    per_warp = g.softmax_tiles
    scores_t, state_t = tile(f32, 4 * per_warp), tile(f32, 2 * per_warp)
    n_scores, n_state = 4 * per_warp, 2 * per_warp

    def row_of(e: int) -> int:
        return 2 * (e // 4) + e % 2

    def fill(value: float) -> Any:
        return tile_op(state_t, [], lambda b: [const(value)] * n_state)

    def exponents_body(b: Any, scores: Any, scale: Any, m: Any) -> list[Any]:
        minus_m = [b.fsub(const(-0.0), x) for x in unpack(b, m, n_state)]  # NVVM knows no fneg
        return [fma(b, x, scale, minus_m[row_of(e)]) for e, x in enumerate(unpack(b, scores, n_scores))]

    def exceeds_body(b: Any, d: Any) -> Any:
        values = unpack(b, d, n_scores)
        while len(values) > 1:
            pairs = [fmax(b, x, y) for x, y in zip(values[::2], values[1::2], strict=False)]
            values = pairs + values[len(values) - len(values) % 2 :]
        over = b.zext(b.fcmp_ordered(">", values[0], const(GROWTH)), I32)
        return any_lane(b, over)

    def grow_body(b: Any, scores: Any, scale: Any, m: Any) -> list[Any]:
        s, out = unpack(b, scores, n_scores), []
        for row, old in enumerate(unpack(b, m, n_state)):
            e = 4 * (row // 2) + row % 2
            largest = over_tokens(b, fmax(b, s[e], s[e + 2]), fmax)
            out.append(fmax(b, old, b.fmul(largest, scale)))
        return out

    def pairwise(body: Any) -> Any:
        return lambda b, x, y: [
            body(b, u, v) for u, v in zip(unpack(b, x, n_state), unpack(b, y, n_state), strict=True)
        ]

    def add_sums_body(b: Any, sums: Any, p: Any) -> list[Any]:
        p = unpack(b, p, n_scores)
        return [
            b.fadd(total, b.fadd(p[4 * (row // 2) + row % 2], p[4 * (row // 2) + row % 2 + 2]))
            for row, total in enumerate(unpack(b, sums, n_state))
        ]

    def exists(b: Any, n: int, my_tile: Any) -> Any | None:
        """None where n8 tile my_tile + n always exists, else a flag."""
        if g.n_tiles % per_warp == 0 or n < per_warp - 1:
            return None
        return less(b, my_tile, g.n_tiles - n)

    def rows_to_shared(b: Any, address: Any, values: list[Any], my_tile: Any) -> None:
        """One float a query row, by the lanes that hold its first token."""
        lanes = lane_id(b)
        at = b.add(address, b.add(b.mul(my_tile, integer(32)), b.mul(lanes, integer(8))))
        for n in range(per_warp):
            flag = less(b, lanes, 4)
            if (also := exists(b, n, my_tile)) is not None:
                flag = b.and_(flag, also)
            store_shared(b, at, 32 * n, values[2 * n : 2 * n + 2], flag)

    def store_alpha_body(b: Any, address: Any, alpha: Any, my_tile: Any) -> None:
        rows_to_shared(b, address, unpack(b, alpha, n_state), my_tile)

    def store_inverse_body(b: Any, address: Any, sums: Any, my_tile: Any) -> None:
        inverse = []
        for total in unpack(b, sums, n_state):
            reciprocal = asm(b, F32, "rcp.approx.ftz.f32 $0, $1;", "=f,f", [total], volatile=False)
            inverse.append(b.select(b.fcmp_ordered("==", total, const(0.0)), const(0.0), reciprocal))
        rows_to_shared(b, address, inverse, my_tile)

    def store_weights_body(b: Any, address: Any, p: Any, my_tile: Any) -> None:
        """[16 tokens][8 rows] bf16 an n8 tile: ldmatrix.trans turns it into a B fragment."""
        values = unpack(b, p, n_scores)
        at = b.add(address, b.add(b.mul(my_tile, integer(256)), b.mul(lane_id(b), integer(4))))
        for n in range(per_warp):
            for half in range(2):
                e = 4 * n + 2 * half
                word = pack_bf16(b, values[e], values[e + 1])
                store_shared(b, at, 256 * n + 128 * half, [word], exists(b, n, my_tile))

    def store_grew_body(b: Any, address: Any, grew: Any) -> None:
        store_shared(b, address, 0, [grew], less(b, lane_id(b), 1))

    def store_lse_body(b: Any, pointer: Any, m: Any, sums: Any, my_row: Any, rows: Any, natural: Any) -> None:
        lanes = lane_id(b)
        factor = b.select(b.icmp_signed("!=", natural, integer(0)), const(math.log(2.0)), const(1.0))
        for row, (top, total) in enumerate(zip(unpack(b, m, n_state), unpack(b, sums, n_state), strict=True)):
            lse = b.fmul(b.fadd(top, lg2(b, total)), factor)
            lse = b.select(b.fcmp_ordered("==", total, const(0.0)), const(float("-inf")), lse)
            local = b.add(b.mul(lanes, integer(2)), integer(8 * (row // 2) + row % 2))
            inside = b.zext(b.icmp_signed("<", b.add(my_row, local), rows), I32)
            flag = b.and_(less(b, lanes, 4), inside)
            at = b.add(pointer, b.mul(b.sext(local, pointer.type), wide(4)))
            store = "{.reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.f32 [$0], $1;}"
            asm(b, VOID, store, "l,f,r,~{memory}", [at, lse, flag])

    store_lse_at = tile_op(void, [i64, state_t, state_t, i32, i32, i32], store_lse_body)

    @device
    def store_lse(pointer, row_offset, m, sums, my_row, rows, natural):
        store_lse_at(pointer + 4 * (i64(row_offset) + my_row), m, sums, my_row, rows, natural)

    one_exp2 = lambda b, x: [ex2(b, v) for v in unpack(b, x, n_scores)]  # noqa: E731
    return SimpleNamespace(
        lowest=fill(-FLT_MAX), zero_sums=fill(0.0),
        exponents=tile_op(scores_t, [scores_t, float32, state_t], exponents_body),
        exceeds=tile_op(i32, [scores_t], exceeds_body),
        grow=tile_op(state_t, [scores_t, float32, state_t], grow_body),
        rescale=tile_op(state_t, [state_t, state_t], pairwise(lambda b, old, new: ex2(b, b.fsub(old, new)))),
        scale_sums=tile_op(state_t, [state_t, state_t], pairwise(lambda b, x, y: b.fmul(x, y))),
        exp2=tile_op(scores_t, [scores_t], one_exp2),
        add_sums=tile_op(state_t, [state_t, scores_t], add_sums_body),
        total_sums=tile_op(state_t, [state_t], lambda b, x: [over_tokens(b, v, add) for v in unpack(b, x, n_state)]),
        store_alpha=tile_op(void, [i32, state_t, i32], store_alpha_body),
        store_grew=tile_op(void, [i32, i32], store_grew_body),
        store_weights=tile_op(void, [i32, scores_t, i32], store_weights_body),
        store_inverse=tile_op(void, [i32, state_t, i32], store_inverse_body),
        store_lse=store_lse,
    )  # fmt: skip
