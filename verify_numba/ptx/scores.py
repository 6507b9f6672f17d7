"""S = K Q^T for one tile: queries in registers, keys from shared memory, parts of the sum through shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verify_numba.dims import D_V
from verify_numba.geometry import TILE, Geometry
from verify_numba.kernels.work import CHAIN
from verify_numba.ptx.asm import (
    I32,
    I64,
    VOID,
    anew,
    asm,
    asm_many,
    const,
    f32,
    i32,
    i64,
    instruction,
    integer,
    lane_id,
    ldmatrix,
    load_shared,
    mma,
    plus,
    shuffle_xor,
    store_shared,
    tile,
    tile_op,
    unpack,
    void,
)
from verify_numba.ptx.control import device, lane, quotient, remainder

load_u8 = instruction(i32, [i64], "{.reg .b16 t; ld.global.nc.u8 t, [$1]; cvt.u32.u16 $0, t;}", "=r,l")


def score_ops(g: Geometry) -> SimpleNamespace:
    return SimpleNamespace(**_product_ops(g), **_exchange_ops(g), **_mask_ops(g))


def _product_ops(g: Geometry) -> dict[str, Any]:
    group, steps = g.group_tiles, g.warp_k_steps
    products_t, queries_t = tile(f32, 4 * group), tile(i32, 2 * group * steps)
    first_rope = g.value_columns // 32

    # Four loads of a word each, or one of four words, which lanes then trade: a quarter of the loads. The single form
    # also runs below compute capability 9.0, where a shuffle may cost a call that saves all registers.
    wide_loads = g.cluster == 2
    lane_bytes = 16 if wide_loads else 4

    def turn(b: Any, words: list[Any], t: Any) -> list[Any]:
        """Lane t of four neighbours has words 4t .. 4t + 3 of sixteen, and gets words t, t + 4, t + 8, t + 12."""
        for distance in (1, 2):
            upper = b.icmp_signed("!=", b.and_(t, integer(distance)), integer(0))
            for i in (j for j in range(4) if not j & distance):
                low, high = words[i], words[i + distance]
                theirs = shuffle_xor(b, b.select(upper, low, high), distance)
                words[i] = b.select(upper, theirs, low)
                words[i + distance] = b.select(upper, high, theirs)
        return words

    def load_words(b: Any, address: Any, offset: int, flag: Any, n: int) -> list[Any]:
        """n neighbouring words, 0 where the flag is not set."""
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(n))
        registers = ",".join(f"${i}" for i in range(n))
        load = f"ld.global.nc.v4.b32 {{{registers}}}" if n == 4 else f"ld.global.nc.b32 {registers}"
        text = f"{{.reg .pred p; setp.ne.s32 p, ${n + 1}, 0; {zeros} @p {load}, [${n}{plus(offset)}];}}"
        return asm_many(b, I32, n, text, ",".join(["=&r"] * n + ["l", "r"]), [address, flag])

    def load_q_body(b: Any, *args: Any) -> list[Any]:
        """B fragments of Q^T: lane (g, t) holds row g, columns 2t, 2t + 1 and 2t + 8, 2t + 9 of every 16, which are
        words t, t + 4, t + 8 and t + 12 of every 32."""
        addresses, flags, rank, part = args[:group], args[group : 2 * group], args[-2], anew(b, args[-1])
        value = b.add(b.mul(part, integer(32 * steps)), b.mul(rank, integer(2 * g.value_columns)))
        rope = b.add(value, b.mul(rank, integer(2 * (g.rope_columns - g.value_columns))))
        rope = b.add(rope, integer(2 * (D_V - g.value_columns)))
        # Only the last share's last columns are rope: all else is a constant distance from one address.
        late = b.select(b.icmp_signed("==", part, integer(g.k_groups - 1)), rope, value)
        first_late = first_rope - (g.k_groups - 1) * steps // 2
        out = []
        for address, flag in zip(addresses, flags, strict=True):
            places = [b.add(address, b.sext(column, I64)) for column in (value, late)]
            for block in range(steps // 2):
                place = places[block >= first_late]
                if wide_loads:
                    out.append(load_words(b, place, 64 * block, flag, 4))
                else:
                    out.append([load_words(b, place, 64 * block + at, flag, 1)[0] for at in range(0, 64, 16)])
        t = b.and_(lane_id(b), integer(3))
        return [word for words in out for word in (turn(b, words, t) if wide_loads else words)]

    load_fragments = tile_op(queries_t, [i64] * group + [i32] * (group + 2), load_q_body)

    @device
    def row_address(q, token_stride, head_stride, n0, row, H):
        return q + (n0 + quotient(row, H)) * token_stride + remainder(row, H) * head_stride + lane_bytes * (lane() & 3)

    @device
    def load_q_three(q, token_stride, head_stride, n0, row, rows, H, rank, part):
        r0 = i32(row + (lane() >> 2))
        r1, r2 = i32(r0 + 8), i32(r0 + 16)
        return load_fragments(
            row_address(q, token_stride, head_stride, n0, r0, H),
            row_address(q, token_stride, head_stride, n0, r1, H),
            row_address(q, token_stride, head_stride, n0, r2, H),
            i32(r0 < rows), i32(r1 < rows), i32(r2 < rows), rank, part,
        )  # fmt: skip

    @device
    def load_q_one(q, token_stride, head_stride, n0, row, rows, H, rank, part):
        r0 = i32(row + (lane() >> 2))
        return load_fragments(row_address(q, token_stride, head_stride, n0, r0, H), i32(r0 < rows), rank, part)

    chains = g.key_chains
    ahead = 4
    """Key fragments loaded before they are needed."""

    def score_body(b: Any, stage: Any, queries: Any, part: Any) -> list[Any]:
        lanes = lane_id(b)
        matrix, line = b.lshr(lanes, integer(3)), b.and_(lanes, integer(7))
        token = b.add(b.mul(b.and_(matrix, integer(1)), integer(8)), line)
        column = b.add(b.mul(b.lshr(matrix, integer(1)), integer(16)), b.mul(part, integer(32 * steps)))
        address = b.add(stage, b.add(b.mul(token, integer(g.row_stride)), column))
        q = unpack(b, queries, 2 * group * steps)
        keys = [ldmatrix(b, address, 32 * step, 4) for step in range(min(ahead, steps))]
        sums = [[[const(0.0)] * 4 for _ in range(chains)] for _ in range(group)]
        for step in range(steps):
            if step + ahead < steps:
                keys.append(ldmatrix(b, address, 32 * (step + ahead), 4))
            for n in range(group):
                at = 2 * (n * steps + step)
                sums[n][step % chains] = mma(b, keys[step], q[at : at + 2], sums[n][step % chains])
        out = []
        for parts in sums:
            for e in range(4):
                total = parts[0][e]
                for part in parts[1:]:
                    total = b.fadd(total, part[e])
                out.append(total)
        return out

    return {
        "load_q": load_q_three if group == 3 else load_q_one,
        "score": tile_op(products_t, [i32, queries_t, i32], score_body),
    }


def _exchange_ops(g: Geometry) -> dict[str, Any]:
    group, clustered, mine = g.group_tiles, g.cluster == 2, g.softmax_tiles
    products_t, scores_t = tile(f32, 4 * group), tile(f32, 4 * mine)
    uneven = g.n_tiles % g.softmax_stride != 0
    step = 512 * g.softmax_warps
    """From one row tile of a softmax warp to its next, among those of its block."""

    def place(b: Any, scores: Any, own_tile: Any) -> Any:
        return b.add(scores, b.add(b.mul(own_tile, integer(512)), b.mul(lane_id(b), integer(16))))

    def load_tiles(b: Any, at: Any, last: Any, offset: int) -> list[Any]:
        """This warp's row tiles of one part, of which the last lies at `last`."""
        words = [x for i in range(mine - 1) for x in load_shared(b, at, offset + step * i, 4)]
        return words + load_shared(b, last, offset, 4)

    def deliver(own_parity: int) -> Any:
        def body(b: Any, products: Any, own: Any, partner: Any, bar: Any, first: Any) -> None:
            """Row tiles of one parity to this block, of the other to the partner, whose barrier counts the bytes."""
            values, first = unpack(b, products, 4 * group), anew(b, first)
            places = [b.lshr(b.add(first, integer(n)), integer(1)) if clustered else first for n in range(2)]
            here, there = ([place(b, scores, at) for at in places] for scores in (own, partner))
            send = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
            for n in range(group):
                words = values[4 * n : 4 * n + 4]
                if not clustered:
                    store_shared(b, here[0], 512 * n, words)
                elif n % 2 == own_parity:
                    store_shared(b, here[n % 2], 512 * (n // 2), words)
                else:
                    text = f"{send} [$0{plus(512 * (n // 2))}], {{$2,$3,$4,$5}}, [$1];"
                    asm(b, VOID, text, "r,r,f,f,f,f,~{memory}", [there[n % 2], bar, *words])

        return tile_op(void, [products_t, i32, i32, i32, i32], body)

    def arm_body(b: Any, bar: Any, me: Any, rank: Any) -> None:
        """Expect the partner's parts: one lane of the first softmax warp says so."""
        if clustered:
            text = (
                "{.reg .pred p; .reg .b64 s; setp.eq.s32 p, $2, 0; "
                "@p mbarrier.arrive.expect_tx.shared.b64 s, [$0], $1;}"
            )
            own_tiles = b.lshr(b.sub(integer(g.n_tiles + 1), rank), integer(1))
            args = [bar, b.mul(own_tiles, integer(512 * g.k_groups)), b.or_(lane_id(b), me)]
            asm(b, VOID, text, "r,r,r,~{memory}", args)

    def add_up(b: Any, parts: list[list[Any]]) -> list[Any]:
        while len(parts) > 1:
            neighbours = zip(parts[::2], parts[1::2], strict=False)
            pairs = [[b.fadd(x, y) for x, y in zip(p, q, strict=True)] for p, q in neighbours]
            parts = pairs + parts[len(parts) - len(parts) % 2 :]
        return parts[0]

    def gather_body(b: Any, scores: Any, partner: Any, me: Any, rank: Any) -> list[Any]:
        # A warp's last tile may not exist: then its first is read again, whose maxima it shares; or nothing at all.
        first = b.add(b.mul(me, integer(g.cluster)), rank)
        exists = b.icmp_signed("<", first, integer(g.n_tiles - g.softmax_stride * (mine - 1)))
        to_last = b.select(exists, integer(step * (mine - 1)), integer(0)) if uneven else integer(step * (mine - 1))
        parts = []
        for block in (scores, partner)[: g.cluster]:
            at = place(b, block, me)
            last = b.add(at, to_last)
            parts += [load_tiles(b, at, last, g.score_bytes * part) for part in range(g.k_groups)]
        out = add_up(b, parts)
        return [b.select(exists, x, const(0.0)) for x in out] if uneven and mine == 1 else out

    return {
        "deliver_even": deliver(0),
        "deliver_odd": deliver(1),
        "arm_scores": tile_op(void, [i32, i32, i32], arm_body),
        "gather_scores": tile_op(scores_t, [i32, i32, i32, i32], gather_body),
    }


def _mask_ops(g: Geometry) -> dict[str, Any]:
    size = 4 * g.softmax_tiles
    scores_t = tile(f32, size)

    def keep_first_body(b: Any, scores: Any, valid: Any) -> list[Any]:
        token = b.lshr(lane_id(b), integer(2))
        keep = [b.icmp_signed("<", b.add(token, integer(8 * half)), valid) for half in range(2)]
        values = unpack(b, scores, size)
        return [b.select(keep[e % 4 // 2], x, const(float("-inf"))) for e, x in enumerate(values)]

    def keep_seen_body(b: Any, scores: Any, bits: Any) -> list[Any]:
        out = []
        for e, x in enumerate(unpack(b, scores, size)):
            cell = b.icmp_signed("!=", b.and_(bits, integer(1 << e)), integer(0))
            out.append(b.select(cell, x, const(float("-inf"))))
        return out

    tile_rows = 8 * g.softmax_stride
    lane_anew = tile_op(i32, [], lambda b: anew(b, lane_id(b)))

    @device
    def seen(cells, stride, layout, my_row, H, T, token0):
        """A bit for each score of the lane: whether its row sees its token."""
        bits, me = i32(0), lane_anew()
        for e in range(size):
            i = quotient(i32(my_row + tile_rows * (e // 4) + 2 * (me & 3) + e % 2), H)
            j = i32(token0 + 8 * (e % 4 // 2) + (me >> 2))
            cell = i32(0)
            if i < T and j < T:
                if layout == CHAIN:
                    cell = i32(j <= i)
                else:
                    cell = i32(load_u8(cells + i64(i) * stride + j) != 0)
            bits = i32(bits | (cell << e))
        return bits

    chunks_a_row = 2 * g.value_columns // 16
    chunks, step = TILE * chunks_a_row, 32 * g.score_warps

    def clean_chunk(b: Any, stage: Any, chunk: Any) -> None:
        """Zero what is not finite among the eight bf16 values of one 16-byte chunk."""
        # A lane behind the end looks again at the chunk it did before.
        chunk = b.select(b.icmp_signed("<", chunk, integer(chunks)), chunk, b.sub(chunk, integer(step)))
        row, column = b.udiv(chunk, integer(chunks_a_row)), b.urem(chunk, integer(chunks_a_row))
        address = b.add(stage, b.add(b.mul(row, integer(g.row_stride)), b.mul(column, integer(16))))
        cleaned = []
        for word in load_shared(b, address, 0, 4, I32):
            for shift in (0, 16):
                exponent = integer(0x7F80 << shift)
                bad = b.icmp_signed("==", b.and_(word, exponent), exponent)
                word = b.select(bad, b.and_(word, integer(0xFFFF0000 if shift == 0 else 0xFFFF)), word)
            cleaned.append(word)
        store_shared(b, address, 0, cleaned)

    def clean_body(b: Any, stage: Any, me: Any) -> None:
        asm(b, VOID, f"bar.sync 1, {32 * g.score_warps};", "~{memory}", [])
        mine = b.add(b.mul(anew(b, me), integer(32)), lane_id(b))
        for first in range(0, chunks, step):
            clean_chunk(b, stage, b.add(mine, integer(first)))

    return {
        "keep_first": tile_op(scores_t, [scores_t, i32], keep_first_body),
        "nothing_seen": tile_op(i32, [], lambda b: integer(0)),
        "seen": seen,
        "keep_seen": tile_op(scores_t, [scores_t, i32], keep_seen_body),
        "clean_values": tile_op(void, [i32, i32], clean_body),
    }
