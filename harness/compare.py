"""Compares one result with a reference, element by element, and says where and by how much it is off.

NaN never passes: an element whose error is not a number is off, whatever the tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.comparison import Check, Comparison, Coordinate
from harness.ulp import row_ulp_error, ulp_error


@dataclass(frozen=True)
class Tolerance:
    """What a result [N, H, ...] may be off by: an element, a row's 2-norm, and all of it.

    The last is the 2-norm of the error over that of the reference; `element` and `row` are
    one number or [N, H].
    """

    element: NDArray | float
    row: NDArray | float = math.inf
    rel_norm: float = math.inf

    def __add__(self, other: Tolerance) -> Tolerance:
        """For two results that each lie so near to the same answer."""
        return Tolerance(self.element + other.element, self.row + other.row, self.rel_norm + other.rel_norm)


def compare(
    check: Check, got: NDArray, ref: NDArray, tolerance: Tolerance, *, qo_indptr: NDArray[np.integer]
) -> Comparison:
    """Compare out [N, H, D_V] or lse [N, H] with a reference of the same shape; equal infinities agree.

    Raises ValueError where the shapes differ.
    """
    if got.shape != ref.shape:
        raise ValueError(f"{check}: shape {got.shape}, expected {ref.shape}")
    got64, ref64 = got.astype(np.float64), ref.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(got64 == ref64, 0.0, np.abs(got64 - ref64))
    allowed = _spread(tolerance.element, error.shape)
    off = ~((error <= allowed) & np.isfinite(error))
    return _judge(check, got64, ref64, error, allowed, off, tolerance, qo_indptr)


def compare_bits(check: Check, got: NDArray, ref: NDArray, *, qo_indptr: NDArray[np.integer]) -> Comparison:
    """Like `compare`, but nothing may differ: +0 is not -0, and NaN is off even where its bits agree.

    Raises ValueError where shapes or dtypes differ.
    """
    if (got.shape, got.dtype) != (ref.shape, ref.dtype):
        raise ValueError(f"{check}: {got.dtype}{got.shape}, expected {ref.dtype}{ref.shape}")
    got64, ref64 = got.astype(np.float64), ref.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(got64 == ref64, 0.0, np.abs(got64 - ref64))
    off = (_bits(got) != _bits(ref)) | np.isnan(got64)
    return _judge(check, got64, ref64, error, np.zeros(error.shape), off, Tolerance(0.0), qo_indptr)


def _judge(
    check: Check,
    got: NDArray,
    ref: NDArray,
    error: NDArray,
    allowed: NDArray,
    off: NDArray[np.bool_],
    tolerance: Tolerance,
    qo_indptr: NDArray[np.integer],
) -> Comparison:
    by_row = error.reshape(*error.shape[:2], math.prod(error.shape[2:]))
    row_norm = np.sqrt((by_row**2).sum(-1))
    row_allowed = _spread(tolerance.row, row_norm.shape)
    rows_off = ~(row_norm <= row_allowed) | off.reshape(by_row.shape).any(-1)
    rel_norm = relative_norm(error, ref)
    is_out = check.tensor == "out"
    uses = _use(error, allowed, off)
    index = _worst_index(uses, error)
    return Comparison(
        check=check,
        elements=error.size,
        elements_off=int(off.sum()),
        rows=rows_off.size,
        rows_off=int(rows_off.sum()),
        not_finite=int((~np.isfinite(error)).sum()),
        max_abs=float(error.max(initial=0.0)),
        max_ulp=float(ulp_error(got, ref).max(initial=0.0)) if is_out else None,
        max_row_ulp=float(row_ulp_error(got, ref).max(initial=0.0)) if is_out else None,
        rel_norm=rel_norm,
        rel_norm_limit=tolerance.rel_norm,
        budget_use=max(
            float(uses.max(initial=0.0)),
            float(_use(row_norm, row_allowed).max(initial=0.0)),
            float(_use(np.array(rel_norm), np.array(tolerance.rel_norm))),
        ),
        worst=None if index is None else coordinate(index, qo_indptr),
        got=math.nan if index is None else float(got[index]),
        expected=math.nan if index is None else float(ref[index]),
        tolerance=math.nan if index is None else float(allowed[index]),
    )


def relative_norm(error: NDArray[np.float64], ref: NDArray[np.float64]) -> float:
    """||error|| / ||ref|| over all elements (2-norm); infinities of `ref` that are met count as 0."""
    error_norm = float(np.linalg.norm(error))
    ref_norm = float(np.linalg.norm(np.where(np.isinf(ref), 0.0, ref)))
    if error_norm == 0.0:
        return 0.0
    return error_norm / ref_norm if ref_norm > 0 else math.inf


def _spread(limit: NDArray | float, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """One number or [N, H], for every element of [N, H, ...]."""
    limits = np.asarray(limit, np.float64)
    return np.broadcast_to(limits.reshape(limits.shape + (1,) * (len(shape) - limits.ndim)), shape)


def _use(error: NDArray, allowed: NDArray, off: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """error / allowed; infinite where it is not a number or where nothing is allowed and something is off."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / allowed)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    return ratio if off is None else np.where(off & (ratio <= 1), np.inf, ratio)


def _worst_index(uses: NDArray, error: NDArray) -> tuple[int, ...] | None:
    """Where most of the tolerance is used; among equals (nothing was allowed) where the error is largest."""
    if not uses.size:
        return None
    size = np.where(np.isnan(error), np.inf, error)
    flat = int(np.where(uses == uses.max(), size, -1.0).argmax())
    return tuple(int(i) for i in np.unravel_index(flat, uses.shape))


def coordinate(index: tuple[int, ...], qo_indptr: NDArray[np.integer]) -> Coordinate:
    """The place of a row, head and perhaps column of the batch within its request."""
    row, head, *column = index
    request = int(np.searchsorted(qo_indptr, row, side="right")) - 1
    return Coordinate(request, row - int(qo_indptr[request]), head, column[0] if column else None)


def _bits(x: NDArray) -> NDArray[np.unsignedinteger]:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
