"""MLA verify attention of one request in float64, as plainly as it can be written.

A key is a latent row of ``D_QK`` numbers shared by all heads; its first ``D_V`` are the value (DeepSeek-V2,
arXiv 2405.04434, the absorbed form). For draft token i and head h over the keys it sees::

    out[i, h] = sum_j softmax_j(sm_scale * q[i, h] . key_j) * key_j[:D_V]
    lse[i, h] = ln sum_j exp(sm_scale * q[i, h] . key_j)

A key that a row does not see takes no part in any operation of that row, so what it holds does not matter. A
row that sees no key has out 0 and lse -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verify_numba.dims import D_V

Array = np.ndarray[Any, np.dtype[Any]]
OutLse = tuple[Array, Array]
"""out [T, H, D_V] float64 and natural-log lse [T, H] float64."""


def attention(q: Array, rows: Array, k: Array, mask: Array, sm_scale: float) -> OutLse:
    """Each draft token over its whole prefix and the draft tokens that its mask row allows: one softmax.

    Args:
        q: [T, H, D_QK] queries.
        rows: [L, 1, D_QK] or [L, D_QK], the prefix, seen by every row.
        k: [T, 1, D_QK] or [T, D_QK], the draft keys.
        mask: [T, T] bool, (i, j) true where token i sees draft token j.
        sm_scale: softmax scale.
    """
    q, rows, k = _f64(q), _keys(rows), _keys(k)
    out = np.empty((*q.shape[:2], D_V))
    lse = np.empty(q.shape[:2])
    for i, queries in enumerate(q):
        out[i], lse[i] = _attend(queries, (rows, k[mask[i]]), sm_scale)
    return out, lse


def prefix(q: Array, rows: Array, sm_scale: float) -> OutLse:
    """Each draft token over its prefix alone; arguments as for :func:`attention`."""
    q, rows = _f64(q), _keys(rows)
    out = np.empty((*q.shape[:2], D_V))
    lse = np.empty(q.shape[:2])
    for i, queries in enumerate(q):
        out[i], lse[i] = _attend(queries, (rows,), sm_scale)
    return out, lse


def tail(q: Array, k: Array, mask: Array, sm_scale: float) -> OutLse:
    """Each draft token over the draft tokens of its mask row alone; arguments as for :func:`attention`."""
    q, k = _f64(q), _keys(k)
    out = np.empty((*q.shape[:2], D_V))
    lse = np.empty(q.shape[:2])
    for i, queries in enumerate(q):
        out[i], lse[i] = _attend(queries, (k[mask[i]],), sm_scale)
    return out, lse


def merge(parts: Sequence[OutLse]) -> OutLse:
    """Join attention over disjoint sets of keys, weighted by exp(lse); a part with lse -inf changes nothing.

    The split softmax of flash decoding; any number of parts, in any order. Raises ValueError for no parts.
    """
    if not parts:
        raise ValueError("parts: found none, expected at least one")
    lses = np.stack([_f64(lse) for _, lse in parts])
    top = lses.max(axis=0)
    base = np.where(top == -np.inf, 0.0, top)
    with np.errstate(invalid="ignore"):
        weights = np.exp(lses - base)
    total = weights.sum(axis=0)
    out = np.zeros(parts[0][0].shape)
    for (part, _), weight in zip(parts, weights, strict=True):
        # The out of a part without weight may be an uninitialised buffer: it is not touched.
        heavy = weight > 0
        out[heavy] += weight[heavy][:, None] * _f64(part)[heavy]
    with np.errstate(divide="ignore"):
        return out / np.where(total == 0, 1.0, total)[..., None], base + np.log(total)


def _attend(q: Array, keys: Sequence[Array], sm_scale: float) -> OutLse:
    """One token, [H, D_QK], over the keys of several blocks, each [n, D_QK]: one softmax over all of them."""
    # A key or a query that is not finite makes its rows NaN, as it should: no warning.
    with np.errstate(invalid="ignore"):
        scores = np.concatenate([q @ block.T for block in keys], axis=1) * sm_scale
        if scores.shape[1] == 0:
            return np.zeros((len(q), D_V)), np.full(len(q), -np.inf)
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        ends = np.cumsum([len(block) for block in keys])[:-1]
        shares = np.split(weights / total, ends, axis=1)
        out = np.zeros((len(q), D_V))
        for share, block in zip(shares, keys, strict=True):
            out += share @ block[:, :D_V]
        return out, (top + np.log(total))[:, 0]


def _f64(array: Array) -> Array:
    return np.asarray(array).astype(np.float64)


def _keys(rows: Array) -> Array:
    return _f64(rows).reshape(-1, rows.shape[-1])
