"""The value warps' tile: O = alpha O + P^T V over their columns, and its way to global memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.dims import D_V
from verify_numba.geometry import COLUMN_GROUP, MMA_N, TILE, WARP, Geometry
from verify_numba.lockstep.bf16 import narrow, widen
from verify_numba.lockstep.machine import current

Floats = NDArray[np.float32]
GROUPS = D_V // COLUMN_GROUP
M_TILE = 16
TILE_SHAPE = (WARP, 4)
"""A partial result of eight rows and 16 columns as an mma accumulator: [lane, register]."""
TILE_BYTES = 4 * WARP * 4
PARTIAL_SHAPE = (COLUMN_GROUP // M_TILE, *TILE_SHAPE)
"""A column group of it."""
PARTIAL_BYTES = TILE_BYTES * PARTIAL_SHAPE[0]
STORE_ALIGN = 4


def pack_partial(o: Floats) -> Floats:
    """[8 n, 16 k] float32 -> [n, k, *TILE_SHAPE]: row and column to the lane and register that hold them.

    Row 2 c + e is in lanes with l % 4 = c, registers with r % 2 = e; column 16 a + 8 h + d is in m16 tile a,
    lanes with l // 4 = d, registers with r // 2 = h.
    """
    n, k = len(o) // MMA_N, o.shape[1] // M_TILE
    axes = o.reshape(n, 4, 2, k, 2, 8)  # [n, c, e, a, h, d]
    return np.ascontiguousarray(axes.transpose(0, 3, 5, 1, 4, 2)).reshape(n, k, *TILE_SHAPE)


def unpack_partial(packed: Floats) -> Floats:
    """The inverse of `pack_partial` for a column group."""
    n = len(packed)
    axes = packed.reshape(n, 2, 8, 4, 2, 2)
    return np.ascontiguousarray(axes.transpose(0, 3, 5, 1, 4, 2)).reshape(n * MMA_N, COLUMN_GROUP)


def value_ops(g: Geometry) -> dict[str, Any]:
    columns = M_TILE * g.m_tiles

    def zero_o() -> Floats:
        return np.zeros((g.rows, columns), np.float32)

    def grew_flags(note: int) -> NDArray[np.bool_]:
        """One a softmax warp of the cluster."""
        words = current().read(note + 32 * g.softmax_tiles, np.int32, (g.softmax_stride, 1), 4 * WARP)
        flags: NDArray[np.bool_] = words[:, 0] != 0
        return flags

    def factors(note: int) -> Floats:
        """[rows], from the notes of all softmax warps of the cluster."""
        words = current().read(note, np.float32, (g.softmax_stride, WARP // 8, 2, 4))
        by_tile = words[:, : g.softmax_tiles].transpose(1, 0, 3, 2)
        return np.ascontiguousarray(by_tile).reshape(-1)[: g.rows]

    def any_grew(note: int) -> int:
        """Whether any softmax warp's maximum has grown."""
        return int(grew_flags(note).any())

    def scale_o(o: Floats, note: int) -> Floats:
        """Multiplies rows of softmax warps whose maximum has grown by alpha; the other alphas are unset."""
        grew = np.repeat(np.resize(grew_flags(note), g.n_tiles), MMA_N)
        alpha = np.where(grew, factors(note), np.float32(1))
        scaled: Floats = o * alpha[:, None]
        return scaled

    def accumulate(o: Floats, stage: int, weights: int, me: int) -> Floats:
        """o + P^T V for the columns of value warp `me`."""
        warp = current()
        p = widen(warp.read(weights, np.uint16, (g.n_tiles, TILE, MMA_N)))
        v = widen(warp.read(stage + 2 * columns * me, np.uint16, (TILE, columns), g.row_stride))
        added: Floats = o + p.transpose(0, 2, 1).reshape(g.rows, TILE) @ v
        return added

    def normalised(o: Floats, inverse: int) -> Floats:
        whole: Floats = o * factors(inverse)[:, None]
        return whole

    def owned(rank: int, me: int) -> tuple[int, int]:
        """First column of a warp, and how many it has: the last warp multiplies some that it does not own."""
        return rank * g.value_columns + columns * me, min(columns, g.value_columns - columns * me)

    def store_partial(o: Floats, inverse: int, part_o: int, row_index: int, rank: int, me: int) -> None:
        """float32 [row tile, m16 tile of columns, *TILE_SHAPE], from the row tile of `row_index` on."""
        first, count = owned(rank, me)
        packed = pack_partial(normalised(o, inverse)[:, :count])
        row_tiles = row_index // MMA_N + np.arange(g.n_tiles)
        addresses = part_o + PARTIAL_BYTES * GROUPS * row_tiles + TILE_BYTES * (first // M_TILE)
        current().memory.store_rows(addresses, packed.view(np.uint8).reshape(g.n_tiles, -1), 16)

    def store_out(
        o: Floats, inverse: int, out: int, row_offset: int, row0: int, rows: int, rank: int, me: int
    ) -> None:
        """bf16 rows of the result, as far as the request has rows."""
        count = min(g.rows, rows - row0)
        first, width = owned(rank, me)
        bits = narrow(normalised(o, inverse)[:count, :width])
        row = row_offset + row0 + np.arange(count, dtype=np.int64)
        addresses = out + 2 * (D_V * row + first)
        current().memory.store_rows(addresses, bits.view(np.uint8), STORE_ALIGN)

    return {
        "zero_o": zero_o,
        "any_grew": any_grew,
        "scale_o": scale_o,
        "accumulate": accumulate,
        "store_partial": store_partial,
        "store_out": store_out,
    }
