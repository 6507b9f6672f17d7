"""S = K Q^T for one tile: queries in registers, keys through ldmatrix, the partner block's half through its memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verify_numba.dims import D_V
from verify_numba.geometry import MMA_K, TILE, Geometry
from verify_numba.kernels.work import CHAIN
from verify_numba.ptx.asm import (
    I32,
    I64,
    VOID,
    asm,
    const,
    f32,
    i32,
    i64,
    instruction,
    integer,
    lane_id,
    ldmatrix,
    less,
    load_shared,
    mma,
    mma_if,
    plus,
    store_shared,
    tile,
    tile_op,
    unpack,
    void,
)
from verify_numba.ptx.control import device, lane, quotient, remainder

load_u8 = instruction(
    i32, [i64], "{.reg .b16 t; ld.global.nc.u8 t, [$1]; cvt.u32.u16 $0, t;}", "=r,l"
)


def score_ops(g: Geometry) -> SimpleNamespace:
    per_warp, k_steps = g.tiles_per_score_warp, g.k_steps
    uneven = g.n_tiles % per_warp != 0
    last_warp = g.score_warps - 1
    scores_t, queries_t = tile(f32, 4 * per_warp), tile(i32, 2 * per_warp * k_steps)
    value_steps = g.value_columns // MMA_K

    def active(b: Any, n: int, me: Any) -> Any | None:
        """None where tile n of this warp always exists, else a flag."""
        return less(b, me, last_warp) if uneven and n == per_warp - 1 else None

    def column_bytes(step: int) -> int:
        """Where k-step `step` of a block's columns lies in a row of q, less the block's own offset."""
        return 2 * MMA_K * step if step < value_steps else 2 * (D_V + MMA_K * (step - value_steps))

    def load_q_body(b: Any, *args: Any) -> list[Any]:
        """B fragments of Q^T: lane (g, t) holds row g, columns 2t, 2t+1 and 2t+8, 2t+9 of each k-step."""
        addresses, flags, rank = args[:per_warp], args[per_warp : 2 * per_warp], args[-1]
        value_shift = b.sext(b.mul(rank, integer(2 * g.value_columns)), I64)
        rope_shift = b.sext(b.mul(rank, integer(2 * g.rope_columns)), I64)
        out = []
        for address, flag in zip(addresses, flags, strict=True):
            value, rope = b.add(address, value_shift), b.add(address, rope_shift)
            for step in range(k_steps):
                base = value if step < value_steps else rope
                for half in range(2):
                    text = (
                        "{.reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; "
                        f"@p ld.global.nc.b32 $0, [$1{plus(column_bytes(step) + 16 * half)}];}}"
                    )
                    out.append(asm(b, I32, text, "=&r,l,r", [base, flag]))
        return out

    load_fragments = tile_op(queries_t, [i64] * per_warp + [i32] * per_warp + [i32], load_q_body)

    @device
    def row_address(q, token_stride, head_stride, n0, row, H):
        return q + (n0 + quotient(row, H)) * token_stride + remainder(row, H) * head_stride + 4 * (lane() & 3)

    @device
    def load_q_two(q, token_stride, head_stride, n0, my_row, rows, H, rank):
        row0, row1 = i32(my_row + (lane() >> 2)), i32(my_row + 8 + (lane() >> 2))
        return load_fragments(
            row_address(q, token_stride, head_stride, n0, row0, H),
            row_address(q, token_stride, head_stride, n0, row1, H),
            i32(row0 < rows), i32(row1 < rows), rank,
        )  # fmt: skip

    @device
    def load_q_one(q, token_stride, head_stride, n0, my_row, rows, H, rank):
        row = i32(my_row + (lane() >> 2))
        return load_fragments(row_address(q, token_stride, head_stride, n0, row, H), i32(row < rows), rank)

    chains = g.score_chains // per_warp
    """Independent sums a tile, so that an mma need not wait for the one before."""
    ahead = 1
    """Key fragments loaded before they are needed."""

    def score_body(b: Any, stage: Any, queries: Any, me: Any) -> list[Any]:
        lanes = lane_id(b)
        matrix, line = b.lshr(lanes, integer(3)), b.and_(lanes, integer(7))
        token = b.add(b.mul(b.and_(matrix, integer(1)), integer(8)), line)
        address = b.add(stage, b.add(b.mul(token, integer(g.row_stride)), b.mul(b.lshr(matrix, integer(1)), integer(16))))
        q = unpack(b, queries, 2 * per_warp * k_steps)
        sums = [[[const(0.0)] * 4 for _ in range(chains)] for _ in range(per_warp)]
        keys = [ldmatrix(b, address, 32 * step, 4) for step in range(ahead)]
        for step in range(k_steps):
            if step + ahead < k_steps:
                keys.append(ldmatrix(b, address, 32 * (step + ahead), 4))
            for n in range(per_warp):
                at = 2 * (n * k_steps + step)
                chain, flag = step % chains, active(b, n, me)
                if flag is None:
                    sums[n][chain] = mma(b, keys[step], q[at : at + 2], sums[n][chain])
                else:
                    sums[n][chain] = mma_if(b, keys[step], q[at : at + 2], sums[n][chain], flag)
        out = []
        for parts in sums:
            for e in range(4):
                total = parts[0][e]
                for part in parts[1:]:
                    total = b.fadd(total, part[e])
                out.append(total)
        return out

    def tile_address(b: Any, exchange: Any, me: Any) -> Any:
        return b.add(exchange, b.add(b.mul(me, integer(512 * per_warp)), b.mul(lane_id(b), integer(16))))

    def send_body(b: Any, scores: Any, kept: Any, exchange: Any, bar: Any, me: Any, rank: Any) -> None:
        values = unpack(b, scores, 4 * per_warp)
        nbytes = integer(512 * per_warp)
        if uneven:
            nbytes = b.sub(nbytes, b.mul(b.sub(integer(1), less(b, me, last_warp)), integer(512)))
        text = "{.reg .pred p; setp.eq.s32 p, $2, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;}"
        asm(b, VOID, text, "r,r,r,~{memory}", [bar, nbytes, lane_id(b)])
        partner = b.xor(rank, integer(1))
        there = "mapa.shared::cluster.u32 $0, $1, $2;"
        address = asm(b, I32, there, "=r,r,r", [tile_address(b, exchange, me), partner], volatile=False)
        remote_bar = asm(b, I32, there, "=r,r,r", [bar, partner], volatile=False)
        store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        own = tile_address(b, kept, me)
        for n in range(per_warp):
            flag = active(b, n, me)
            store_shared(b, own, 512 * n, values[4 * n : 4 * n + 4], flag)
            flag = flag or integer(1)
            text = f"{{.reg .pred p; setp.ne.s32 p, $6, 0; @p {store} [$0{plus(512 * n)}], {{$2,$3,$4,$5}}, [$1];}}"
            asm(b, VOID, text, "r,r,f,f,f,f,r,~{memory}", [address, remote_bar, *values[4 * n : 4 * n + 4], flag])

    def receive_body(b: Any, kept: Any, exchange: Any, me: Any) -> list[Any]:
        mine, theirs = (
            [x for n in range(per_warp) for x in load_shared(b, tile_address(b, place, me), 512 * n, 4)]
            for place in (kept, exchange)
        )
        out = []
        for e, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            flag, total = active(b, e // 4, me), b.fadd(x, y)
            if flag is not None:  # nothing was sent for a tile that does not exist
                total = b.select(b.icmp_signed("!=", flag, integer(0)), total, const(0.0))
            out.append(total)
        return out

    def keep_first_body(b: Any, scores: Any, valid: Any) -> list[Any]:
        values = unpack(b, scores, 4 * per_warp)
        token = b.lshr(lane_id(b), integer(2))
        keep = [b.icmp_signed("<", b.add(token, integer(8 * half)), valid) for half in range(2)]
        return [b.select(keep[e % 4 // 2], x, const(float("-inf"))) for e, x in enumerate(values)]

    def keep_bits_body(b: Any, scores: Any, bits: Any) -> list[Any]:
        out = []
        for e, x in enumerate(unpack(b, scores, 4 * per_warp)):
            seen = b.icmp_signed("!=", b.and_(bits, integer(1 << e)), integer(0))
            out.append(b.select(seen, x, const(float("-inf"))))
        return out

    keep_bits = tile_op(scores_t, [scores_t, i32], keep_bits_body)

    @device
    def keep_visible(scores, cells, stride, layout, my_row, H, T, token0):
        bits = i32(0)
        for e in range(4 * per_warp):
            i = quotient(i32(my_row + 8 * (e // 4) + 2 * (lane() & 3) + e % 2), H)
            j = i32(token0 + 8 * (e % 4 // 2) + (lane() >> 2))
            seen = i32(0)
            if i < T and j < T:
                if layout == CHAIN:
                    seen = i32(j <= i)
                else:
                    seen = i32(load_u8(cells + i64(i) * stride + j) != 0)
            bits = i32(bits | (seen << e))
        return keep_bits(scores, bits)

    chunks_a_row = 2 * g.value_columns // 16

    chunks, step = TILE * chunks_a_row, 32 * g.score_warps

    def clean_chunk(b: Any, stage: Any, chunk: Any, flag: Any) -> None:
        """Zero what is not finite among the eight bf16 values of one 16-byte chunk."""
        row, column = b.udiv(chunk, integer(chunks_a_row)), b.urem(chunk, integer(chunks_a_row))
        address = b.add(stage, b.add(b.mul(row, integer(g.row_stride)), b.mul(column, integer(16))))
        cleaned = []
        for word in load_shared(b, address, 0, 4, I32):
            for shift in (0, 16):
                exponent = integer(0x7F80 << shift)
                bad = b.icmp_signed("==", b.and_(word, exponent), exponent)
                word = b.select(bad, b.and_(word, integer(0xFFFF0000 if shift == 0 else 0xFFFF)), word)
            cleaned.append(word)
        store_shared(b, address, 0, cleaned, flag)

    def clean_body(b: Any, stage: Any, me: Any) -> None:
        asm(b, VOID, f"bar.sync 1, {32 * g.score_warps};", "~{memory}", [])
        mine = b.add(b.mul(me, integer(32)), lane_id(b))
        for first in range(0, chunks, step):
            chunk = b.add(mine, integer(first))
            flag = less(b, chunk, chunks) if first + step > chunks else None
            # A lane behind the end looks at the last chunk, and leaves it.
            inside = b.select(b.icmp_signed("<", chunk, integer(chunks)), chunk, integer(chunks - 1))
            clean_chunk(b, stage, inside, flag)
        # The next copy into this stage may go through the asynchronous proxy; these are ordinary stores.
        asm(b, VOID, "fence.proxy.async.shared::cta;" if g.bulk else "", "~{memory}", [])

    return SimpleNamespace(
        load_q=load_q_two if per_warp == 2 else load_q_one,
        no_scores=tile_op(scores_t, [], lambda b: [const(0.0)] * (4 * per_warp)),
        score=tile_op(scores_t, [i32, queries_t, i32], score_body),
        send=tile_op(void, [scores_t, i32, i32, i32, i32, i32], send_body),
        receive=tile_op(scores_t, [i32, i32, i32], receive_body),
        keep_first=tile_op(scores_t, [scores_t, i32], keep_first_body),
        keep_visible=keep_visible,
        clean_values=tile_op(void, [i32, i32], clean_body),
    )  # fmt: skip
