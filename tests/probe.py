"""The read-back probe: which keys did a row attend to, with no tolerance to argue about.

All queries are zero, so that all scores are equal, and the value of a request's j-th key (prefix first, then
draft tokens) is one-hot(j): a row's output spells its attended set, each key with weight 1 / size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.cases import BF16, Array, SyntheticBatch
from verify_numba.dims import D_QK, D_V


def make_probe(batch: SyntheticBatch, first: int = 0) -> SyntheticBatch:
    """The batch with zero queries and one-hot values; column c of the output stands for key ``first + c``.

    Keys outside ``first .. first + 511`` have value zero. Poison stays where it was.
    """
    kv_pool = np.array(batch.kv_pool)
    k = np.zeros_like(batch.k)
    for b in range(batch.bs):
        slots = batch.kv_indices[batch.kv_indptr[b] : batch.kv_indptr[b + 1]]
        kv_pool[slots, 0] = _one_hot(np.arange(len(slots)) - first)
        tokens = slice(int(batch.qo_indptr[b]), int(batch.qo_indptr[b + 1]))
        k[tokens, 0] = _one_hot(len(slots) + np.arange(batch.draft_lengths[b]) - first)
    return replace(batch, q=np.zeros_like(batch.q), k=k, kv_pool=kv_pool)


def attended(out: Array) -> Array:
    """[N, H, 512] bool: the keys that each output row [N, H, 512] of a probe names."""
    return np.asarray(np.asarray(out).astype(np.float64) != 0)


def should_attend(batch: SyntheticBatch, masks: list[Array], first: int = 0) -> Array:
    """[N, H, 512] bool: the right answer, from the tree masks [T_b, T_b] of the requests."""
    seen = np.zeros((batch.N, batch.H, D_V), dtype=np.bool_)
    for b, mask in enumerate(masks):
        row = np.concatenate([np.ones((len(mask), batch.prefix_lengths[b]), dtype=np.bool_), mask], axis=1)
        window = row[:, first : first + D_V]
        seen[batch.qo_indptr[b] : batch.qo_indptr[b + 1], :, : window.shape[1]] = window[:, None]
    return seen


def _one_hot(columns: Array) -> Array:
    rows = np.zeros((len(columns), D_QK), dtype=BF16)
    inside = (columns >= 0) & (columns < D_V)
    rows[np.flatnonzero(inside), columns[inside]] = 1
    return rows
