"""O^T = alpha O^T + V^T P^T for one value warp: 16 output columns a row of mma, eight query rows a column."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verify_numba.dims import D_V
from verify_numba.geometry import COLUMN_GROUP, Geometry
from verify_numba.ptx.asm import (
    I32,
    I64,
    VOID,
    any_lane,
    asm,
    const,
    f32,
    i32,
    i64,
    integer,
    lane_id,
    ldmatrix,
    less,
    load_shared,
    mma,
    plus,
    store_global,
    tile,
    tile_op,
    unpack,
    void,
    wide,
)
from verify_numba.ptx.control import device


def value_ops(g: Geometry) -> SimpleNamespace:
    m_tiles, n_tiles = g.m_tiles, g.n_tiles
    warp_columns = 16 * m_tiles
    size = 4 * m_tiles * n_tiles
    o_t = tile(f32, size)
    flag_at = 32 * g.softmax_tiles

    def at(m: int, n: int) -> int:
        """Fragment (m, n) starts here: columns g, g + 8 of m16 tile m, rows 2t, 2t + 1 of n8 tile n."""
        return 4 * (m * n_tiles + n)

    def any_grew_body(b: Any, note: Any) -> Any:
        lanes = lane_id(b)
        last = integer(g.softmax_stride - 1)
        mine = b.select(b.icmp_signed("<", lanes, last), lanes, last)
        (flag,) = load_shared(b, b.add(note, b.mul(mine, integer(128))), flag_at, 1, I32)
        return any_lane(b, flag)

    def factors_of(b: Any, note: Any, n: int) -> list[Any]:
        """Of rows 2t and 2t + 1 of n8 tile n: see `ptx.softmax`."""
        at = b.add(note, b.mul(b.and_(lane_id(b), integer(3)), integer(4)))
        first = 128 * (n % g.softmax_stride) + 32 * (n // g.softmax_stride)
        return [load_shared(b, at, first + 16 * e, 1)[0] for e in range(2)]

    def scale_o_body(b: Any, o: Any, note: Any) -> list[Any]:
        v = unpack(b, o, size)
        for n in range(n_tiles):
            (flag,) = load_shared(b, note, 128 * (n % g.softmax_stride) + flag_at, 1, I32)
            grown = b.icmp_signed("!=", flag, integer(0))
            factors = [b.select(grown, x, const(1.0)) for x in factors_of(b, note, n)]
            for m in range(m_tiles):
                for e in range(4):
                    v[at(m, n) + e] = b.fmul(v[at(m, n) + e], factors[e % 2])
        return v

    def accumulate_body(b: Any, o: Any, stage: Any, weights: Any, me: Any) -> list[Any]:
        v, lanes = unpack(b, o, size), lane_id(b)
        matrix, line = b.lshr(lanes, integer(3)), b.and_(lanes, integer(7))
        token = b.add(b.mul(b.lshr(matrix, integer(1)), integer(8)), line)
        column = b.add(b.mul(b.and_(matrix, integer(1)), integer(16)), b.mul(me, integer(2 * warp_columns)))
        values_at = b.add(stage, b.add(b.mul(token, integer(g.row_stride)), column))
        weights_at = b.add(weights, b.mul(lanes, integer(16)))
        columns = [ldmatrix(b, values_at, 32 * m, 4, trans=True) for m in range(m_tiles)]

        def load_weights(n: int) -> list[list[Any]]:
            """B fragments of n8 tiles n and n + 1."""
            if n + 1 < n_tiles:
                r = ldmatrix(b, weights_at, 256 * n, 4, trans=True)
                return [r[:2], r[2:]]
            return [ldmatrix(b, weights_at, 256 * n, 2, trans=True)] if n < n_tiles else []

        following = load_weights(0)
        for n in range(0, n_tiles, 2):
            fragments, following = following, load_weights(n + 2)
            for i, fragment in enumerate(fragments):
                for m in range(m_tiles):
                    j = at(m, n + i)
                    v[j : j + 4] = mma(b, columns[m], fragment, v[j : j + 4])
        return v

    def normalised(b: Any, o: Any, inverse: Any) -> list[Any]:
        v = unpack(b, o, size)
        for n in range(n_tiles):
            factors = factors_of(b, inverse, n)
            for m in range(m_tiles):
                for e in range(4):
                    v[at(m, n) + e] = b.fmul(v[at(m, n) + e], factors[e % 2])
        return v

    group_stride = 1024 * (D_V // COLUMN_GROUP)
    block_tiles = g.value_columns // 16

    def stores(b: Any, me: Any, m: int) -> Any | None:
        """None where m16 tile m of every warp has columns, else a flag."""
        if not g.uneven_columns:
            return None
        return less(b, b.mul(me, integer(m_tiles)), block_tiles - m)

    def store_partial_body(b: Any, o: Any, inverse: Any, pointer: Any, rank: Any, me: Any) -> None:
        """[row tile][column group][m16 tile of the group][lane][4] float32: a warp stores 512 bytes in a run."""
        v = normalised(b, o, inverse)
        m_tile = b.add(b.mul(rank, integer(block_tiles)), b.mul(me, integer(m_tiles)))
        offset = b.add(b.mul(m_tile, integer(512)), b.mul(lane_id(b), integer(16)))
        base = b.add(pointer, b.sext(offset, I64))
        flags = [stores(b, me, m) for m in range(m_tiles)]
        for n in range(n_tiles):
            for m in range(m_tiles):
                store_global(b, base, n * group_stride + 512 * m, v[at(m, n) : at(m, n) + 4], flags[m])

    def store_out_body(b: Any, o: Any, inverse: Any, pointer: Any, row0: Any, rows: Any, rank: Any, me: Any) -> None:
        v, lanes = normalised(b, o, inverse), lane_id(b)
        row = b.add(row0, b.mul(b.and_(lanes, integer(3)), integer(2)))
        column = b.add(b.mul(rank, integer(g.value_columns)), b.mul(me, integer(warp_columns)))
        column = b.add(column, b.lshr(lanes, integer(2)))
        offset = b.add(b.mul(b.sext(row, I64), wide(2 * D_V)), b.sext(b.mul(column, integer(2)), I64))
        base = b.add(pointer, offset)
        columns = [stores(b, me, m) for m in range(m_tiles)]
        for n in range(n_tiles):
            for odd in range(2):
                flag = b.zext(b.icmp_signed("<", b.add(row, integer(8 * n + odd)), rows), I32)
                for m in range(m_tiles):
                    here = flag if columns[m] is None else b.and_(flag, columns[m])
                    for half in range(2):
                        place = plus((8 * n + odd) * 2 * D_V + 2 * (16 * m + 8 * half))
                        text = (
                            "{.reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; cvt.rn.bf16.f32 h, $1; "
                            f"@p st.global.b16 [$0{place}], h;}}"
                        )
                        asm(b, VOID, text, "l,f,r,~{memory}", [base, v[at(m, n) + odd + 2 * half], here])

    store_partial_at = tile_op(void, [o_t, i32, i64, i32, i32], store_partial_body)
    store_out_at = tile_op(void, [o_t, i32, i64, i32, i32, i32, i32], store_out_body)
    tile_bytes = 8 * D_V * 4

    @device
    def store_partial(o, inverse, part_o, row, rank, me):
        store_partial_at(o, inverse, part_o + i64(row // 8) * tile_bytes, rank, me)

    @device
    def store_out(o, inverse, out, row_offset, row0, rows, rank, me):
        store_out_at(o, inverse, out + i64(row_offset) * (2 * D_V), row0, rows, rank, me)

    return SimpleNamespace(
        zero_o=tile_op(o_t, [], lambda b: [const(0.0)] * size),
        any_grew=tile_op(i32, [i32], any_grew_body),
        scale_o=tile_op(o_t, [o_t, i32], scale_o_body),
        accumulate=tile_op(o_t, [o_t, i32, i32, i32], accumulate_body),
        store_partial=store_partial, store_out=store_out,
    )  # fmt: skip
