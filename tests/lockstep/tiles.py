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


def put_stage(g: Geometry, rows: Array) -> None:
    put(g.shared.stage, rows.astype(BF16).view(np.uint16), g.row_stride)
