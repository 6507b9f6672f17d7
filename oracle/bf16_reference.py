"""An ideal bf16 flash kernel, simulated: what accuracy the arithmetic itself allows.

It rounds where a tensor-core flash kernel has to and nowhere else: scores, softmax sums and partial outputs
are float32, the weights are bf16 before they multiply the values, the output is bf16. The softmax is in
base 2, the lse leaves as a natural logarithm.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from oracle.attention import Array, OutLse
from oracle.batch import BatchLike, Request, over_requests, visible
from verify_numba.dims import D_V

F32 = np.float32
_LOG2E = F32(np.log2(np.e))
_LN2 = F32(np.log(2.0))


def round_bf16(array: Array) -> Array:
    """The nearest bf16 number, ties to even, in the dtype that came in."""
    return array.astype(F32).astype(ml_dtypes.bfloat16).astype(array.dtype)


def bf16_verify_batch(
    batch: BatchLike, parts: object = "ALL", *, nsplit: int = 1, headroom: float = 0.0
) -> OutLse:
    """A batch as the ideal bf16 kernel computes it: out [N, H, D_V] and lse [N, H], as float64.

    Args:
        batch: as for :func:`oracle.verify_batch`.
        parts: ALL, PREFIX or TAIL.
        nsplit: the keys are split into so many runs whose float32 results are merged.
        headroom: by how much, in log2, the maximum that the weights refer to trails the true one. A kernel
            that rescales its sums only now and then has some; it decides how the weights fall on the bf16
            grid.
    """

    def attend(request: Request) -> OutLse:
        keys, sees = visible(request, parts)
        q, keys = request.q.astype(F32), keys.astype(F32)
        scale = F32(batch.sm_scale) * _LOG2E
        rows = [_row(q[i], keys[seen], scale, nsplit, F32(headroom)) for i, seen in enumerate(sees)]
        out = np.array([out for out, _ in rows], dtype=np.float64).reshape(*q.shape[:2], D_V)
        return out, np.array([lse for _, lse in rows], dtype=np.float64).reshape(q.shape[:2])

    return over_requests(batch, attend)


def _row(q: Array, keys: Array, scale: Array | np.floating, nsplit: int, headroom: np.float32) -> OutLse:
    """One token, [H, D_QK], over [n, D_QK] keys."""
    parts = [_part(q, block, scale, headroom) for block in np.array_split(keys, nsplit) if len(block)]
    if not parts:
        return np.zeros((len(q), D_V), F32), np.full(len(q), -np.inf, F32)
    lses = np.stack([lse for _, lse in parts])
    top = lses.max(axis=0)
    weights = np.exp2(lses - top)
    total = weights.sum(axis=0, dtype=F32)
    out = np.zeros((len(q), D_V), F32)
    for (part, _), weight in zip(parts, weights, strict=True):
        out += (weight / total)[:, None] * part
    return round_bf16(out), (top + np.log2(total)) * _LN2


def _part(q: Array, keys: Array, scale: Array | np.floating, headroom: np.float32) -> OutLse:
    """One run of keys: out and base-2 lse, float32."""
    scores = (q @ keys.T) * scale
    top = scores.max(axis=1, keepdims=True) - headroom
    weights = np.exp2(scores - top)
    total = weights.sum(axis=1, keepdims=True, dtype=F32)
    out = round_bf16(weights) @ keys[:, :D_V]
    return out / total, (top + np.log2(total))[:, 0]
