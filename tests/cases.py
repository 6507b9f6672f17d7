"""Synthetic verify batches from a seed, and the list of shapes that tests share.

Everything a kernel must not read is poison: NaN in pool slots that no request owns (the sink, slot 0, among
them), garbage in prefix columns of the mask, between the masks of two requests and behind the last, stale
slots behind ``kv_indptr[bs]`` that name NaN rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.trees import tree_mask
from verify_numba.dims import D_QK

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)
SM_SCALE = 0.13086079996295005
"""The scale of the captured model."""


@dataclass(frozen=True, eq=False)
class SyntheticBatch:
    """The fields of ``VerifyBatch`` (docs/design.md) as NumPy arrays; the mask layout is a name."""

    q: Array
    k: Array
    kv_pool: Array
    qo_indptr: Array
    kv_indptr: Array
    kv_indices: Array
    custom_mask: Array | None
    mask_indptr: Array | None
    sm_scale: float
    mask_layout: str = "FULL_MASK"

    @property
    def bs(self) -> int:
        return len(self.qo_indptr) - 1

    @property
    def N(self) -> int:
        return int(self.qo_indptr[-1])

    @property
    def H(self) -> int:
        return int(self.q.shape[1])

    @property
    def draft_lengths(self) -> list[int]:
        return list(np.diff(self.qo_indptr).tolist())

    @property
    def prefix_lengths(self) -> list[int]:
        return list(np.diff(self.kv_indptr).tolist())

    @property
    def T(self) -> int:
        """The longest draft of the batch, at least 1."""
        return max([1, *self.draft_lengths])


@dataclass(frozen=True)
class Shape:
    """One entry of the shape list: prefix and draft length of each request, and heads."""

    id: str
    prefix: tuple[int, ...]
    drafts: tuple[int, ...]
    H: int = 8

    def make(self, seed: int = 0, **options: Any) -> SyntheticBatch:
        """A batch of this shape; options as for :func:`make_batch`."""
        return make_batch(seed, prefix=self.prefix, drafts=self.drafts, H=self.H, **options)


SHAPES = (
    Shape("one-token", (1,), (1,)),
    Shape("no-prefix", (0,), (9,)),
    Shape("plain", (300,), (9,)),
    Shape("below-a-tile", (63,), (9,)),
    Shape("a-tile", (64,), (9,)),
    Shape("above-a-tile", (65,), (9,)),
    Shape("ragged", (0, 1, 64, 130, 7), (9, 9, 4, 9, 1)),
    Shape("no-draft-in-one", (33, 20, 5), (4, 0, 9)),
    Shape("nothing-at-all", (0, 0), (0, 0)),
    Shape("batch-of-none", (), ()),
    Shape("eagle", (2, 2, 40), (16, 16, 16)),
    Shape("T-64", (70,), (64,)),
    Shape("T-1", (200, 3), (1, 1)),
    Shape("H-1", (90,), (9,), 1),
    Shape("H-5", (90,), (9,), 5),
    Shape("H-12", (33, 70), (9, 5), 12),
    Shape("H-16", (90,), (9,), 16),
    Shape("H-64", (40,), (5,), 64),
    Shape("H-128", (40,), (3,), 128),
)
"""Small enough for a CPU; ids for ``pytest.mark.parametrize(..., ids=lambda s: s.id)``."""


def make_batch(
    seed: int = 0,
    *,
    prefix: Sequence[int] = (40,),
    drafts: Sequence[int] = (9,),
    H: int = 8,
    tree: str = "tree",
    blind: float = 0.0,
    mask_layout: str = "FULL_MASK",
    mask_dtype: Any = np.bool_,
    index_dtype: Any = np.int64,
    indptr_dtype: Any = np.int32,
    q_layout: str = "contiguous",
    stale: int = 16,
    logit_std: float = 2.0,
    sm_scale: float = SM_SCALE,
    scattered: bool = True,
) -> SyntheticBatch:
    """A batch of ``len(prefix)`` requests.

    Args:
        prefix, drafts: L and draft tokens of each request; both may be 0.
        tree: shape of the masks, see :func:`tests.trees.tree_mask`. CHAIN layout has chains only.
        blind: share of the draft tokens that see no draft token, not even themselves.
        q_layout: strides of q: ``contiguous``, ``heads-first`` (a transposed view) or ``padded`` (with NaN).
        stale: poisoned entries behind what the indptrs cover, in kv_indices and custom_mask.
        logit_std: standard deviation of the scaled scores.
        scattered: whether the slots of a request are in random order; otherwise they ascend without gaps.
    """
    rng = np.random.default_rng(seed)
    qo_indptr = _indptr(drafts, indptr_dtype)
    kv_indptr = _indptr(prefix, indptr_dtype)
    n, total = int(qo_indptr[-1]), int(kv_indptr[-1])
    q_std = logit_std / (sm_scale * np.sqrt(D_QK))
    kv_pool, kv_indices = _pool(rng, total, stale, scattered)
    if mask_layout == "CHAIN":
        custom_mask = mask_indptr = None
    else:
        masks = [tree_mask(rng, t, tree, blind) for t in drafts]
        custom_mask, mask_indptr = _flat_masks(rng, masks, prefix, mask_layout, stale)
        custom_mask, mask_indptr = custom_mask.astype(mask_dtype), mask_indptr.astype(np.int64)
    return SyntheticBatch(
        q=_queries(rng, n, H, q_std, q_layout),
        k=rng.standard_normal((n, 1, D_QK)).astype(BF16),
        kv_pool=kv_pool,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices.astype(index_dtype),
        custom_mask=custom_mask,
        mask_indptr=mask_indptr,
        sm_scale=sm_scale,
        mask_layout=mask_layout,
    )


def _indptr(lengths: Sequence[int], dtype: Any) -> Array:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(dtype)


def _queries(rng: np.random.Generator, n: int, h: int, std: float, layout: str) -> Array:
    values = (std * rng.standard_normal((n, h, D_QK))).astype(BF16)
    if layout == "heads-first":
        return np.ascontiguousarray(values.transpose(1, 0, 2)).transpose(1, 0, 2)
    if layout == "padded":
        padded = np.full((n, h + 1, D_QK + 64), np.nan, dtype=BF16)
        padded[:, :h, :D_QK] = values
        return padded[:, :h, :D_QK]
    if layout != "contiguous":
        raise ValueError(f"q_layout: found {layout}, expected contiguous, heads-first or padded")
    return values


def _pool(rng: np.random.Generator, total: int, stale: int, scattered: bool) -> tuple[Array, Array]:
    """A pool with NaN in every slot not owned, and the slot list with its stale end."""
    slots = 2 * total + 8
    order = rng.permutation(np.arange(1, slots)) if scattered else np.arange(1, slots)
    kv_pool = np.full((slots, 1, D_QK), np.nan, dtype=BF16)
    kv_pool[order[:total]] = rng.standard_normal((total, 1, D_QK)).astype(BF16)
    return kv_pool, np.concatenate([order[:total], rng.choice(order[total:], stale)])


def _flat_masks(
    rng: np.random.Generator, masks: list[Array], prefix: Sequence[int], layout: str, stale: int
) -> tuple[Array, Array]:
    """The flat mask and its starts; garbage in every cell that is not a draft token's."""
    pieces: list[Array] = []
    starts: list[int] = []
    at = 0
    for mask, length in zip(masks, prefix, strict=True):
        if layout == "FULL_MASK":
            mask = np.concatenate(
                [_garbage(rng, len(mask) * length).reshape(len(mask), length), mask], axis=1
            )
        elif layout != "QLEN_ONLY":
            raise ValueError(f"mask_layout: found {layout}, expected FULL_MASK, QLEN_ONLY or CHAIN")
        gap = _garbage(rng, int(rng.integers(4)) if starts and stale else 0)
        starts.append(at + len(gap))
        pieces += [gap, mask.ravel()]
        at += len(gap) + mask.size
    # The last entry of mask_indptr is not a start; graph buffers leave it at zero.
    flat = np.concatenate([*pieces, _garbage(rng, stale)])
    return flat, np.array([*starts, 0 if stale else at], dtype=np.int64)


def _garbage(rng: np.random.Generator, cells: int) -> Array:
    return rng.random(cells) < 0.5
