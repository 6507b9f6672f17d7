"""The online softmax of a softmax warp, in base 2."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.geometry import GROWTH, MMA_N, TILE, Geometry
from verify_numba.lockstep.machine import current

Floats = NDArray[np.float32]
LN2 = np.float32(np.log(2))


def exponents(scores: Floats, scale: float, m: Floats) -> Floats:
    """scores * scale - m, rounded once, as a fused multiply-add does."""
    exact: NDArray[np.float64] = scores.astype(np.float64) * np.float32(scale) - m
    return exact.astype(np.float32)


def exceeds(d: Floats) -> int:
    """Whether any exponent is beyond the growth that is let pass; a NaN is not."""
    return int((d > np.float32(GROWTH)).any())


def grow(scores: Floats, scale: float, m: Floats) -> Floats:
    """The maximum of m and of the tile, a NaN ignored."""
    grown: Floats = np.fmax(m, np.fmax.reduce(scores * np.float32(scale), axis=0))
    return grown


def rescale(m: Floats, grown: Floats) -> Floats:
    """What sums under the old maximum are multiplied by."""
    alpha: Floats = np.exp2(m - grown)
    return alpha


def add_sums(sums: Floats, p: Floats) -> Floats:
    added: Floats = sums + p.sum(axis=0, dtype=np.float32)
    return added


def inverses(sums: Floats) -> Floats:
    """One over the softmax denominators; 0 for a row that saw nothing."""
    return np.where(sums == 0, np.float32(0), np.float32(1) / sums)


def softmax_ops(g: Geometry) -> dict[str, Any]:
    my_rows = MMA_N * g.softmax_tiles

    def store_lse(
        ptr: int, row_offset: int, m: Floats, sums: Floats, my_row: int, rows: int, natural: int
    ) -> None:
        """log2 (or ln) of the denominators; -inf for a row that saw nothing, NaN where it is NaN."""
        lse = np.where(sums == 0, np.float32(-np.inf), m + np.log2(sums))
        lse = (lse * LN2 if natural else lse).reshape(-1, MMA_N)
        for n, values in enumerate(lse):
            row = my_row + MMA_N * g.softmax_stride * n
            count = min(MMA_N, rows - row)
            if count > 0:
                current().memory.store(ptr + 4 * (row_offset + row), values[:count])

    def lowest() -> Floats:
        """A maximum below every score, yet finite: -inf less -inf would be NaN."""
        return np.full(my_rows, np.finfo(np.float32).min, np.float32)

    def zero_sums() -> Floats:
        return np.zeros(my_rows, np.float32)

    return {
        "lowest": lowest,
        "zero_sums": zero_sums,
        "unset_state": lambda: np.full(my_rows, np.nan, np.float32),
        "unset_scores": lambda: np.full((TILE, my_rows), np.nan, np.float32),
        "exponents": exponents,
        "exceeds": exceeds,
        "grow": grow,
        "rescale": rescale,
        "scale_sums": lambda sums, alpha: sums * alpha,
        "exp2": np.exp2,
        "add_sums": add_sums,
        "total_sums": lambda sums: sums,
        "inverses": inverses,
        "store_lse": store_lse,
    }
