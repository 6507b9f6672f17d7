"""Errors in units in the last place (ulp) of bf16.

A bf16 number has 8 exponent and 8 significand bits (7 stored), so at magnitude 2**e one ulp is 2**(e - 7).
Correct rounding of a float64 value is off by at most half an ulp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STORED_BITS = 7
MIN_EXPONENT = -126
"""Exponent of the smallest normal bf16 number; subnormals share its ulp."""


def bf16_ulp(x: NDArray) -> NDArray[np.float64]:
    """Size of one bf16 ulp at each value of `x` (any shape); NaN and infinity give NaN."""
    x64 = np.abs(np.asarray(x, np.float64))
    with np.errstate(invalid="ignore"):
        _, exponent = np.frexp(x64)  # x = m * 2**exponent with m in [0.5, 1)
        exponent = np.where(x64 == 0, MIN_EXPONENT, np.maximum(exponent - 1, MIN_EXPONENT))
        return np.where(np.isfinite(x64), np.ldexp(1.0, exponent - STORED_BITS), np.nan)


def ulp_error(got: NDArray, ref: NDArray) -> NDArray[np.float64]:
    """|got - ref| in bf16 ulp at `ref`, same shape; `ref` need not be a bf16 number.

    Equal infinities are 0 apart; where either side is otherwise not finite the error is not finite.
    """
    return _in_units(got, ref, bf16_ulp(ref))


def row_ulp_error(got: NDArray, ref: NDArray) -> NDArray[np.float64]:
    """Like `ulp_error`, in bf16 ulp at the largest magnitude of the element's row (the last axis).

    An element that cancels to almost nothing carries the rounding of the terms that it is summed from: many
    ulp of its own magnitude, less than one of its neighbours'.
    """
    largest = np.abs(np.asarray(ref, np.float64)).max(axis=-1, keepdims=True, initial=0.0)
    return _in_units(got, ref, bf16_ulp(largest))


def _in_units(got: NDArray, ref: NDArray, unit: NDArray[np.float64]) -> NDArray[np.float64]:
    got64, ref64 = np.asarray(got, np.float64), np.asarray(ref, np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(got64 == ref64, 0.0, np.abs(got64 - ref64) / unit)
