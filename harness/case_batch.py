"""From a captured case to the batch that the kernels take."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from captured_tensors import CaptureCase, scatter_pool
from harness.devices import Device
from verify_numba import MaskLayout, VerifyBatch


def host_batch(case: CaptureCase, *, permute_seed: int | None = None) -> VerifyBatch:
    """The case as NumPy arrays, its rows in a small pool whose other slots are NaN.

    With `permute_seed` every row lies at another slot than without.
    """
    pool = scatter_pool(case, permute_seed=permute_seed)
    return VerifyBatch(
        q=case.q,
        k=case.k,
        kv_pool=pool.kv_pool,
        qo_indptr=case.qo_indptr,
        kv_indptr=case.kv_indptr,
        kv_indices=pool.kv_indices,
        custom_mask=case.custom_mask,
        mask_indptr=case.mask_indptr,
        sm_scale=case.meta.sm_scale,
        mask_layout=MaskLayout[case.meta.mask_layout],
    )


def device_batch(batch: VerifyBatch, device: Device) -> VerifyBatch:
    """The same batch with every array on `device`."""
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
    moved = {name: device.put(a) for name, a in arrays.items() if isinstance(a, np.ndarray)}
    return replace(batch, **moved)
