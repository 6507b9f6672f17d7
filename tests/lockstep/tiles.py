"""Test data for operations on tiles."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.lockstep.support import BY_NAME, Array
from verify_numba.geometry import Geometry
from verify_numba.lockstep.machine import current

BF16 = ml_dtypes.bfloat16
ODD = BY_NAME["cluster72"]
"""Its last softmax warp has one row tile fewer than the other, and its last value warp fewer columns."""


def floats(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def put(offset: int, values: Array, stride: int | None = None) -> None:
    """Writes to the block's shared memory."""
    current().block.shared.view(offset, values.dtype, values.shape, stride)[:] = values


def note_of(g: Geometry, rows: Array, flag: int) -> Array:
    """The 32 words of a softmax warp's note: of factors [softmax_tiles, 8] lane (2n + e, t) has that of row 2t + e of
    the warp's row tile n, and the lanes behind these have the flag."""
    words = np.full(32, flag, np.int32).view(np.float32)
    for n, row in np.ndindex(g.softmax_tiles, 8):
        words[4 * (2 * n + row % 2) + row // 2] = rows[n, row]
    return words


def notes_of(g: Geometry, factors: Array, flags: Array) -> Array:
    """[softmax_stride, 32] words from factors [rows] and a flag a softmax warp; NaN for rows that are not there."""
    by_tile = np.full((g.softmax_stride * g.softmax_tiles, 8), np.nan, np.float32)
    by_tile[: g.n_tiles] = factors.reshape(-1, 8)
    return np.stack([note_of(g, by_tile[w :: g.softmax_stride], int(flags[w])) for w in range(g.softmax_stride)])


def put_stage(g: Geometry, rows: Array) -> None:
    put(g.shared.stage, rows.astype(BF16).view(np.uint16), g.row_stride)
