"""Online softmax over score fragments. Lane (g, t) holds tokens g, g + 8 of query rows 2t, 2t + 1 of each n8 tile.

Per-row state (`m`, sums, alpha) is a tile of two values an n8 tile, equal in the eight lanes of a row except for the
sums, which stay per lane until the end. `m` starts at -FLT_MAX, the identity of max over finite floats: no score lies
below it, and the subtraction in `exponents` never meets inf - inf.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
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
    plus,
    tile,
    tile_op,
    unpack,
    void,
    wide,
)
from verify_numba.ptx.control import device

FLT_MAX = 3.4028234663852886e38


def softmax_ops(g: Geometry) -> SimpleNamespace:
    per_warp, stride = g.softmax_tiles, g.softmax_stride
    scores_t, state_t = tile(f32, 4 * per_warp), tile(f32, 2 * per_warp)
    n_scores, n_state = 4 * per_warp, 2 * per_warp

    def row_of(e: int) -> int:
        return 2 * (e // 4) + e % 2

    def fill(value: float) -> Any:
        return tile_op(state_t, [], lambda b: [const(value)] * n_state)

    def unset(kind: Any, n: int) -> Any:
        return tile_op(kind, [], lambda b: [ir.Constant(F32, ir.Undefined)] * n)

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
        """None where this warp's n8 tile n always exists, else a flag."""
        if g.n_tiles % stride == 0 or n < per_warp - 1:
            return None
        return less(b, my_tile, g.n_tiles - stride * n)

    def post(b: Any, at: Any, words: dict[int, Any], flag: Any | None, bar: Any, reach: Any) -> None:
        """Words to both blocks, each at its offset, where the flag is set; the partner's barrier counts the bytes."""
        send = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"
        when = "" if flag is None else "@p "
        text = "" if flag is None else ".reg .pred p; setp.ne.s32 p, $3, 0; "
        for i, offset in enumerate(words, start=4):
            text += f"{when}st.shared.b32 [$0{plus(offset)}], ${i}; "
            if g.cluster == 2:
                text += f"{when}{send} [$1{plus(offset)}], ${i}, [$2]; "
        args = [at, b.add(at, reach), b.add(bar, reach), integer(1) if flag is None else flag, *words.values()]
        asm(b, VOID, f"{{{text}}}", ",".join(["r"] * len(args)) + ",~{memory}", args)

    def post_note_body(b: Any, note: Any, factors: Any, flag: Any, my_tile: Any, bar: Any, reach: Any) -> None:
        """Lane (2n + e, t) has the factor of row 2t + e of n8 tile n, the lanes behind these have the flag."""
        lanes, word = lane_id(b), flag
        for i, factor in enumerate(unpack(b, factors, n_state)):
            mine = b.icmp_signed("==", b.lshr(lanes, integer(2)), integer(i))
            word = b.select(mine, b.bitcast(factor, I32), word)
        at = b.add(note, b.add(b.mul(my_tile, integer(128)), b.mul(lanes, integer(4))))
        post(b, at, {0: word}, None, bar, reach)

    def inverses_body(b: Any, sums: Any) -> list[Any]:
        """One over the denominators; 0 for a row that saw nothing."""
        inverse = []
        for total in unpack(b, sums, n_state):
            reciprocal = asm(b, F32, "rcp.approx.ftz.f32 $0, $1;", "=f,f", [total], volatile=False)
            inverse.append(b.select(b.fcmp_ordered("==", total, const(0.0)), const(0.0), reciprocal))
        return inverse

    def post_weights_body(b: Any, address: Any, p: Any, my_tile: Any, bar: Any, reach: Any) -> None:
        """[16 tokens][8 rows] bf16 an n8 tile: ldmatrix.trans turns it into a B fragment."""
        values = unpack(b, p, n_scores)
        at = b.add(address, b.add(b.mul(my_tile, integer(256)), b.mul(lane_id(b), integer(4))))
        for n in range(per_warp):
            words = {}
            for half in range(2):
                e = 4 * n + 2 * half
                words[256 * stride * n + 128 * half] = pack_bf16(b, values[e], values[e + 1])
            post(b, at, words, exists(b, n, my_tile), bar, reach)

    def weights_from_partner_body(b: Any, me: Any, rank: Any) -> Any:
        """Bytes of weights that the partner block's warp of the same number sends."""
        theirs = b.add(b.mul(me, integer(g.cluster)), b.xor(rank, integer(1)))
        last = less(b, theirs, g.n_tiles - stride * (per_warp - 1))
        return b.mul(b.add(last, integer(per_warp - 1)), integer(256))

    def store_lse_body(b: Any, pointer: Any, m: Any, sums: Any, my_row: Any, rows: Any, natural: Any) -> None:
        lanes = lane_id(b)
        factor = b.select(b.icmp_signed("!=", natural, integer(0)), const(math.log(2.0)), const(1.0))
        for row, (top, total) in enumerate(zip(unpack(b, m, n_state), unpack(b, sums, n_state), strict=True)):
            lse = b.fmul(b.fadd(top, lg2(b, total)), factor)
            lse = b.select(b.fcmp_ordered("==", total, const(0.0)), const(float("-inf")), lse)
            local = b.add(b.mul(lanes, integer(2)), integer(8 * stride * (row // 2) + row % 2))
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
        unset_state=unset(state_t, n_state), unset_scores=unset(scores_t, n_scores),
        weights_from_partner=tile_op(i32, [i32, i32], weights_from_partner_body),
        post_note=tile_op(void, [i32, state_t, i32, i32, i32, i32], post_note_body),
        post_weights=tile_op(void, [i32, scores_t, i32, i32, i32], post_weights_body),
        inverses=tile_op(state_t, [state_t], inverses_body),
        store_lse=store_lse,
    )  # fmt: skip
