"""A ragged batch taken apart into requests, and the oracle over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oracle.attention import Array, OutLse, attention, prefix, tail
from verify_numba.dims import D_V


class BatchLike(Protocol):
    """The fields of a verify batch (docs/design.md) as NumPy arrays; ``VerifyBatch`` fits as it is."""

    @property
    def q(self) -> Any: ...
    @property
    def k(self) -> Any: ...
    @property
    def kv_pool(self) -> Any: ...
    @property
    def qo_indptr(self) -> Any: ...
    @property
    def kv_indptr(self) -> Any: ...
    @property
    def kv_indices(self) -> Any: ...
    @property
    def custom_mask(self) -> Any: ...
    @property
    def mask_indptr(self) -> Any: ...
    @property
    def sm_scale(self) -> float: ...
    @property
    def mask_layout(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class Batch:
    """A verify batch of loose arrays, for callers that hold no ``VerifyBatch``.

    ``kv_indices`` None means that ``kv_pool`` holds the prefix rows themselves, in order. ``mask_layout`` is
    FULL_MASK, QLEN_ONLY or CHAIN, as a string or as an enum member of that name.
    """

    q: Array
    k: Array
    kv_pool: Array
    qo_indptr: Array
    kv_indptr: Array
    kv_indices: Array | None
    custom_mask: Array | None
    mask_indptr: Array | None
    sm_scale: float
    mask_layout: Any = "FULL_MASK"


@dataclass(frozen=True, eq=False)
class Request:
    """One request of a batch."""

    q: Array
    """[T_b, H, D_QK]"""
    rows: Array
    """[L_b, 1, D_QK], the prefix."""
    k: Array
    """[T_b, 1, D_QK], the draft keys."""
    mask: Array
    """[T_b, T_b] bool."""
    tokens: slice
    """Where its draft tokens lie in the batch."""


def requests(batch: BatchLike) -> Iterator[Request]:
    """Take a batch apart. Nothing behind the indptrs is looked at."""
    for b in range(len(batch.qo_indptr) - 1):
        tokens = slice(int(batch.qo_indptr[b]), int(batch.qo_indptr[b + 1]))
        span = slice(int(batch.kv_indptr[b]), int(batch.kv_indptr[b + 1]))
        rows = batch.kv_pool[span] if batch.kv_indices is None else batch.kv_pool[batch.kv_indices[span]]
        yield Request(batch.q[tokens], rows, batch.k[tokens], tree_mask(batch, b), tokens)


def tree_mask(batch: BatchLike, b: int) -> Array:
    """[T_b, T_b] bool: which draft tokens of request ``b`` see which, cell by cell from the flat mask.

    Raises:
        ValueError: the mask layout is unknown.
    """
    t = int(batch.qo_indptr[b + 1]) - int(batch.qo_indptr[b])
    length = int(batch.kv_indptr[b + 1]) - int(batch.kv_indptr[b])
    layout = _name(batch.mask_layout)
    mask = np.zeros((t, t), dtype=np.bool_)
    for i in range(t):
        for j in range(t):
            if layout == "FULL_MASK":
                mask[i, j] = batch.custom_mask[int(batch.mask_indptr[b]) + i * (length + t) + length + j]
            elif layout == "QLEN_ONLY":
                mask[i, j] = batch.custom_mask[int(batch.mask_indptr[b]) + i * t + j]
            elif layout == "CHAIN":
                mask[i, j] = j <= i
            else:
                raise ValueError(f"mask_layout: found {layout}, expected FULL_MASK, QLEN_ONLY or CHAIN")
    return mask


def verify_batch(batch: BatchLike, parts: Any = "ALL") -> OutLse:
    """The right answer for a batch: out [N, H, D_V] float64 and natural-log lse [N, H] float64.

    Args:
        batch: a :class:`Batch`, a ``VerifyBatch`` of NumPy arrays, or anything with the same fields.
        parts: ALL, or PREFIX or TAIL for one part's own out and lse; a string or an enum member of that name.

    Raises:
        ValueError: ``parts`` or the mask layout is unknown.
    """
    return over_requests(batch, lambda request: _verify(request, batch.sm_scale, _name(parts)))


def over_requests(batch: BatchLike, attend: Callable[[Request], OutLse]) -> OutLse:
    """Apply ``attend`` to each request and put the results together."""
    n, h = batch.q.shape[:2]
    out, lse = np.zeros((n, h, D_V)), np.full((n, h), -np.inf)
    for request in requests(batch):
        out[request.tokens], lse[request.tokens] = attend(request)
    return out, lse


def visible(request: Request, parts: Any) -> tuple[Array, Array]:
    """Keys [L_b + T_b, D_QK] of the request in one list, and [T_b, L_b + T_b] bool: who sees which.

    Raises:
        ValueError: ``parts`` is unknown.
    """
    name = _name(parts)
    _check_parts(name)
    keys = np.concatenate([request.rows, request.k])[:, 0]
    sees_prefix = np.full((len(request.mask), len(request.rows)), name != "TAIL")
    return keys, np.concatenate([sees_prefix, request.mask & (name != "PREFIX")], axis=1)


def _verify(request: Request, sm_scale: float, parts: str) -> OutLse:
    _check_parts(parts)
    if parts == "PREFIX":
        return prefix(request.q, request.rows, sm_scale)
    if parts == "TAIL":
        return tail(request.q, request.k, request.mask, sm_scale)
    return attention(request.q, request.rows, request.k, request.mask, sm_scale)


def _check_parts(name: str) -> None:
    if name not in ("ALL", "PREFIX", "TAIL"):
        raise ValueError(f"parts: found {name}, expected ALL, PREFIX or TAIL")


def _name(member: Any) -> str:
    return str(getattr(member, "name", member))
