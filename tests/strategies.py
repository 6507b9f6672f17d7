"""Hypothesis strategies for trees, lengths, layouts and whole batches."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np

from tests.cases import SyntheticBatch, make_batch
from tests.trees import KINDS, Array, ancestors

LAYOUTS = ("FULL_MASK", "QLEN_ONLY", "CHAIN")


@st.composite
def trees(draw: st.DrawFn, max_t: int = 16) -> Array:
    """Mask of a tree (or forest) whose tokens are numbered in any order."""
    t = draw(st.integers(0, max_t))
    parents = [draw(st.integers(-1, i - 1)) for i in range(t)]
    order = draw(st.permutations(range(t)))
    return ancestors(parents)[list(order)][:, list(order)] if t else np.zeros((0, 0), dtype=np.bool_)


@st.composite
def masks(draw: st.DrawFn, t: int) -> Array:
    """Any [t, t] mask."""
    cells = draw(st.lists(st.booleans(), min_size=t * t, max_size=t * t))
    return np.array(cells, dtype=np.bool_).reshape(t, t)


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    max_bs: int = 4,
    max_prefix: int = 80,
    max_t: int = 12,
    heads: tuple[int, ...] = (1, 2, 5, 8),
    layouts: tuple[str, ...] = LAYOUTS,
) -> SyntheticBatch:
    """A ragged batch of any layout, index and mask dtype, with poison wherever nothing may be read."""
    bs = draw(st.integers(0, max_bs))
    index = st.sampled_from((np.int32, np.int64))
    return make_batch(
        draw(st.integers(0, 2**16)),
        prefix=draw(st.lists(st.integers(0, max_prefix), min_size=bs, max_size=bs)),
        drafts=draw(st.lists(st.integers(0, max_t), min_size=bs, max_size=bs)),
        H=draw(st.sampled_from(heads)),
        tree=draw(st.sampled_from(KINDS)),
        blind=draw(st.sampled_from((0.0, 0.3, 1.0))),
        mask_layout=draw(st.sampled_from(layouts)),
        mask_dtype=draw(st.sampled_from((np.bool_, np.uint8))),
        index_dtype=draw(index),
        indptr_dtype=draw(index),
        q_layout=draw(st.sampled_from(("contiguous", "heads-first", "padded"))),
        stale=draw(st.sampled_from((0, 16))),
        logit_std=draw(st.sampled_from((0.1, 2.0, 30.0))),
    )
