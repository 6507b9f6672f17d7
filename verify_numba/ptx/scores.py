"""S = K Q^T for one tile: queries in registers, keys through ldmatrix, parts of the sum through shared memory.

A score warp multiplies `group_tiles` n8 tiles of query rows over its share of the columns. The tiles of its group that
it owns come first in its registers ("local tile j"); `Owner` maps local tiles to row tiles and owners.
"""

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
    anew,
    asm,
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
    store_shared,
    tile,
    tile_op,
    unpack,
    void,
)
from verify_numba.ptx.control import arrive_warp, device, lane, quotient, remainder, spin
from verify_numba.ptx.ownership import Owner

load_u8 = instruction(i32, [i64], "{.reg .b16 t; ld.global.nc.u8 t, [$1]; cvt.u32.u16 $0, t;}", "=r,l")


def score_ops(g: Geometry) -> SimpleNamespace:
    owner = Owner(g)
    return SimpleNamespace(
        **_product_ops(g, owner), **_exchange_ops(g, owner), **_mask_ops(g),
        owned_tile=tile_op(i32, [i32], owner.first_tile),
    )  # fmt: skip


def _product_ops(g: Geometry, owner: Owner) -> dict[str, Any]:
    group, steps, value_steps = g.group_tiles, g.warp_k_steps, g.value_columns // MMA_K
    products_t, queries_t = tile(f32, 4 * group), tile(i32, 2 * group * steps)

    def load_q_body(b: Any, *args: Any) -> list[Any]:
        """B fragments of Q^T: lane (g, t) holds row g, columns 2t, 2t+1 and 2t+8, 2t+9 of each k-step."""
        addresses, flags, rank, me = args[:group], args[group : 2 * group], args[-2], args[-1]
        first = b.mul(owner.k_group(b, me), integer(steps))
        value_at = b.mul(rank, integer(2 * g.value_columns))
        rope_at = b.add(b.mul(rank, integer(2 * g.rope_columns)), integer(2 * (D_V - g.value_columns)))
        columns = []
        for step in range(steps):
            at = b.add(first, integer(step))
            in_value = b.icmp_signed("<", at, integer(value_steps))
            columns.append(b.add(b.mul(at, integer(2 * MMA_K)), b.select(in_value, value_at, rope_at)))
        out = []
        for address, flag in zip(addresses, flags, strict=True):
            for column in columns:
                place = b.add(address, b.sext(column, I64))
                for half in range(2):
                    text = (
                        "{.reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; "
                        f"@p ld.global.nc.b32 $0, [$1{plus(16 * half)}];}}"
                    )
                    out.append(asm(b, I32, text, "=&r,l,r", [place, flag]))
        return out

    load_fragments = tile_op(queries_t, [i64] * group + [i32] * (group + 2), load_q_body)
    local_row = tile_op(i32, [i32, i32], lambda b, me, j: b.mul(owner.tile(b, me, j), integer(8)))

    @device
    def row_of(row0, me, j):
        return i32(row0 + local_row(me, j) + (lane() >> 2))

    @device
    def row_address(q, token_stride, head_stride, n0, row, H):
        return q + (n0 + quotient(row, H)) * token_stride + remainder(row, H) * head_stride + 4 * (lane() & 3)

    @device
    def load_q_three(q, token_stride, head_stride, n0, row0, rows, H, rank, me):
        r0, r1, r2 = row_of(row0, me, 0), row_of(row0, me, 1), row_of(row0, me, 2)
        return load_fragments(
            row_address(q, token_stride, head_stride, n0, r0, H),
            row_address(q, token_stride, head_stride, n0, r1, H),
            row_address(q, token_stride, head_stride, n0, r2, H),
            i32(r0 < rows), i32(r1 < rows), i32(r2 < rows), rank, me,
        )  # fmt: skip

    @device
    def load_q_one(q, token_stride, head_stride, n0, row0, rows, H, rank, me):
        row = row_of(row0, me, 0)
        return load_fragments(row_address(q, token_stride, head_stride, n0, row, H), i32(row < rows), rank, me)

    chains = 4 if group == 1 else g.chains
    ahead = 3
    """Key fragments loaded before they are needed."""

    def score_body(b: Any, stage: Any, queries: Any, me: Any) -> list[Any]:
        lanes = lane_id(b)
        matrix, line = b.lshr(lanes, integer(3)), b.and_(lanes, integer(7))
        token = b.add(b.mul(b.and_(matrix, integer(1)), integer(8)), line)
        column = b.add(b.mul(b.lshr(matrix, integer(1)), integer(16)), b.mul(owner.k_group(b, me), integer(32 * steps)))
        address = b.add(stage, b.add(b.mul(token, integer(g.row_stride)), column))
        q = unpack(b, queries, 2 * group * steps)
        sums = [[[const(0.0)] * 4 for _ in range(chains)] for _ in range(group)]
        keys = [ldmatrix(b, address, 32 * step, 4) for step in range(ahead)]
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
        "no_products": tile_op(products_t, [], lambda b: [const(0.0)] * (4 * group)),
        "score": tile_op(products_t, [i32, queries_t, i32], score_body),
    }


def _exchange_ops(g: Geometry, owner: Owner) -> dict[str, Any]:
    group, owned, clustered, k_groups = g.group_tiles, g.owned_tiles, g.cluster == 2, g.k_groups
    products_t, scores_t = tile(f32, 4 * group), tile(f32, 4 * owned)

    def place(b: Any, buffer: Any, slot: Any, row_tile: Any) -> Any:
        index = b.add(b.mul(slot, integer(g.n_tiles)), row_tile)
        return b.add(b.add(buffer, b.mul(index, integer(512))), b.mul(lane_id(b), integer(16)))

    def send_remote(b: Any, products: list[Any], buffer: Any, bars: Any, me: Any, rank: Any) -> None:
        """This block's part of every row tile of the group, to the tile's owner in the partner block."""
        mine = b.add(bars, b.mul(me, integer(8)))
        nbytes = b.mul(owner.count(b, me), integer(512 * k_groups))
        text = "{.reg .pred p; setp.eq.s32 p, $2, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;}"
        asm(b, VOID, text, "r,r,r,~{memory}", [mine, nbytes, lane_id(b)])
        partner, there = b.xor(rank, integer(1)), "mapa.shared::cluster.u32 $0, $1, $2;"
        slot = b.add(owner.k_group(b, me), integer(k_groups - 1))
        store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        for j in range(group):
            at = place(b, buffer, slot, owner.tile(b, me, integer(j)))
            bar = b.add(bars, b.mul(owner.warp(b, me, integer(j)), integer(8)))
            remote = [asm(b, I32, there, "=r,r,r", [x, partner], volatile=False) for x in (at, bar)]
            asm(b, VOID, f"{store} [$0], {{$2,$3,$4,$5}}, [$1];", "r,r,f,f,f,f,~{memory}",
                [*remote, *products[4 * j : 4 * j + 4]])  # fmt: skip

    def send_here(b: Any, products: list[Any], buffer: Any, bars: Any, me: Any) -> None:
        """The row tiles that another warp of this block owns, to that warp."""
        mine = owner.k_group(b, me)
        for j in range(1, group):
            theirs = owner.owner_group(b, me, integer(j))
            slot = b.sub(mine, b.zext(b.icmp_signed(">", mine, theirs), I32))
            flag = b.zext(b.icmp_signed("!=", mine, theirs), I32)
            store_shared(b, place(b, buffer, slot, owner.tile(b, me, integer(j))), 0, products[4 * j : 4 * j + 4], flag)
        for distance in range(1, k_groups):
            arrive_warp(b, b.add(bars, b.mul(owner.neighbour(b, me, distance), integer(8))))

    def send_body(b: Any, products: Any, buffer: Any, bars: Any, me: Any, rank: Any) -> None:
        values, me = unpack(b, products, 4 * group), anew(b, me)
        if clustered:
            send_remote(b, values, buffer, bars, me, rank)
        if k_groups > 1:
            send_here(b, values, buffer, bars, me)

    def receive_body(b: Any, scores: Any, buffer: Any, bars: Any, parity: Any, me: Any) -> list[Any]:
        out = unpack(b, scores, 4 * owned)
        if g.exchange_slots == 0:
            return out
        me = anew(b, me)
        bar = b.add(bars, b.mul(me, integer(8)))
        if clustered:
            # Data come from another block, so the acquire must have cluster scope. A fence restricted to shared memory
            # gives it without the cache invalidation that an unrestricted one compiles to.
            spin(b, bar, parity, "mbarrier.try_wait.parity.relaxed.cluster.shared::cta",
                 "fence.acquire.sync_restrict::shared::cluster.cluster;")  # fmt: skip
        else:
            spin(b, bar, parity, "mbarrier.test_wait.parity.shared")
        for j in range(owned):
            at = place(b, buffer, integer(0), owner.tile(b, me, integer(j)))
            for slot in range(g.exchange_slots):
                part = load_shared(b, at, 512 * g.n_tiles * slot, 4)
                out[4 * j : 4 * j + 4] = [b.fadd(x, y) for x, y in zip(out[4 * j : 4 * j + 4], part, strict=True)]
            if (flag := owner.owns(b, me, j)) is not None:
                kept = b.icmp_signed("!=", flag, integer(0))
                out[4 * j : 4 * j + 4] = [b.select(kept, x, const(0.0)) for x in out[4 * j : 4 * j + 4]]
        return out

    return {
        "no_scores": tile_op(scores_t, [], lambda b: [const(0.0)] * (4 * owned)),
        "own": tile_op(scores_t, [products_t], lambda b, products: unpack(b, products, 4 * owned)),
        "send": tile_op(void, [products_t, i32, i32, i32, i32], send_body),
        "receive": tile_op(scores_t, [scores_t, i32, i32, i32, i32], receive_body),
    }


def _mask_ops(g: Geometry) -> dict[str, Any]:
    owned = g.owned_tiles
    scores_t = tile(f32, 4 * owned)

    def keep_first_body(b: Any, scores: Any, valid: Any) -> list[Any]:
        token = b.lshr(anew(b, lane_id(b)), integer(2))
        keep = [b.icmp_signed("<", b.add(token, integer(8 * half)), valid) for half in range(2)]
        values = unpack(b, scores, 4 * owned)
        return [b.select(keep[e % 4 // 2], x, const(float("-inf"))) for e, x in enumerate(values)]

    def keep_bits_body(b: Any, scores: Any, bits: Any) -> list[Any]:
        out = []
        for e, x in enumerate(unpack(b, scores, 4 * owned)):
            seen = b.icmp_signed("!=", b.and_(bits, integer(1 << e)), integer(0))
            out.append(b.select(seen, x, const(float("-inf"))))
        return out

    lane_anew = tile_op(i32, [], lambda b: anew(b, lane_id(b)))
    keep_bits = tile_op(scores_t, [scores_t, i32], keep_bits_body)

    @device
    def keep_visible(scores, cells, stride, layout, my_row, H, T, token0):
        bits, me = i32(0), lane_anew()
        for e in range(4 * owned):
            i = quotient(i32(my_row + 8 * (e // 4) + 2 * (me & 3) + e % 2), H)
            j = i32(token0 + 8 * (e % 4 // 2) + (me >> 2))
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

    def clean_chunk(b: Any, stage: Any, chunk: Any) -> None:
        """Zero what is not finite among the eight bf16 values of one 16-byte chunk."""
        # A lane behind the end looks at the last chunk, and leaves it.
        flag = b.zext(b.icmp_signed("<", chunk, integer(chunks)), I32)
        chunk = b.select(b.icmp_signed("<", chunk, integer(chunks)), chunk, integer(chunks - 1))
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
        mine = b.add(b.mul(anew(b, me), integer(32)), lane_id(b))
        for first in range(0, chunks, step):
            clean_chunk(b, stage, b.add(mine, integer(first)))
        # The next copy into this stage may go through the asynchronous proxy; these are ordinary stores.
        asm(b, VOID, "fence.proxy.async.shared::cta;" if g.bulk else "", "~{memory}", [])

    return {
        "keep_first": tile_op(scores_t, [scores_t, i32], keep_first_body),
        "keep_visible": keep_visible,
        "clean_values": tile_op(void, [i32, i32], clean_body),
    }
