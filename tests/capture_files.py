"""A small valid capture to break, as the plain parts that a CaptureCase is built from."""

from __future__ import annotations

from typing import Any

import numpy as np

from captured_tensors import CaptureCase, CaptureMeta
from tests.cases import make_batch

META = {"sm_scale": 0.125, "num_heads": 2, "max_extend_len": 5, "layer_id": 0, "pool_slots": 1000}


def small_parts(seed: int = 0, **options: Any) -> dict[str, Any]:
    """Tensors of a case of two requests with stale tails: prefixes 3 and 6, drafts 5 and 4."""
    batch = make_batch(seed, prefix=(3, 6), drafts=(5, 4), H=2, **options)
    rows = batch.kv_pool[batch.kv_indices[:9]]
    return {
        "q": batch.q,
        "k": batch.k,
        "v": batch.k[..., :512],
        "qo_indptr": batch.qo_indptr,
        "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices,
        "custom_mask": batch.custom_mask,
        "mask_indptr": batch.mask_indptr,
        "out_cache_loc": np.arange(500, 509),
        "seq_lens": np.array([3, 6]),
        "req_pool_indices": np.array([4, 1]),
        "positions": np.arange(9),
        "prefix_rows": rows,
        "tail_rows": batch.k,
        "out_triton": np.zeros((9, 1024), dtype=batch.q.dtype),
    }


def small_meta(**changes: Any) -> CaptureMeta:
    return CaptureMeta(**{**META, **changes})


def small_case(seed: int = 0, *, meta: CaptureMeta | None = None, **options: Any) -> CaptureCase:
    return CaptureCase(name="small", meta=meta or small_meta(), **small_parts(seed, **options))
