"""bfloat16 as its bits: NumPy has no such type, and the bits are what memory holds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

EXPONENT = 0x7F80
"""All exponent bits set: an infinity or a NaN."""


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """float32 values of bf16 bits, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bits of float32 values, rounded to nearest, ties to even; a NaN stays a NaN."""
    rounded: NDArray[Any] = values.astype(ml_dtypes.bfloat16)
    return rounded.view(np.uint16)
