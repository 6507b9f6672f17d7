"""Whole calls of `Verifier.verify`: a batch with its results' arrays, in NumPy or torch, to change one thing in."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from tests.cases import BF16, SyntheticBatch, make_batch
from verify_numba import MaskLayout, VerifyBatch, VerifyInputError
from verify_numba.binding import Binder
from verify_numba.dims import D_V

T, H, MAX_BS = 9, 8, 4
LIMITS = {"max_bs": MAX_BS, "T": T, "H": H, "device": -1}
INPUTS = ("q", "k", "kv_pool", "qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr")
ARRAYS = (*INPUTS, "out", "lse")


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of `Verifier.verify`; results start out as NaN."""

    batch: VerifyBatch
    out: Any
    lse: Any

    def get(self, field: str) -> Any:
        return getattr(self if field in ("out", "lse") else self.batch, field)

    def put(self, **changes: Any) -> Call:
        """The call with other arrays or settings, by name."""
        own = {name: changes.pop(name) for name in ("out", "lse") if name in changes}
        return replace(self, batch=replace(self.batch, **changes), **own)

    def bind(self, binder: Binder | None = None) -> Any:
        """What a Binder makes of the call: its own where none is given."""
        return (binder or Binder(**LIMITS)).bind(self.batch, self.out, self.lse)


def verify_batch_of(synthetic: SyntheticBatch) -> VerifyBatch:
    values = {f.name: getattr(synthetic, f.name) for f in fields(synthetic)}
    return VerifyBatch(**values | {"mask_layout": MaskLayout[synthetic.mask_layout]})


def call_of(synthetic: SyntheticBatch) -> Call:
    N, heads = synthetic.N, synthetic.H
    return Call(
        verify_batch_of(synthetic), np.full((N, heads, D_V), np.nan, BF16), np.full((N, heads), np.nan, np.float32)
    )


def make_call(**options: Any) -> Call:
    """A good call of two requests in NumPy arrays; options as for `make_batch`."""
    return call_of(make_batch(**{"prefix": (40, 7), "drafts": (9, 4), "H": H} | options))


def as_torch(array: Any, device: str = "cpu") -> Any:
    """The array as a torch tensor of the same strides; on the CPU without a copy."""
    import torch

    if not isinstance(array, np.ndarray):
        return array
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def torch_call(call: Call, device: str = "cpu") -> Call:
    return call.put(**{name: as_torch(call.get(name), device) for name in ARRAYS})


def make_call_in(kind: str, **options: Any) -> Call:
    call = make_call(**options)
    return torch_call(call) if kind == "torch" else call


def bits(array: Any) -> np.ndarray[Any, Any]:
    """bf16 or float32 results as integers, for exact comparisons."""
    if not isinstance(array, np.ndarray):
        import torch

        array = array.detach().cpu()
        array = array.view(torch.int16 if array.dtype is torch.bfloat16 else torch.int32).numpy()
    return array.view(f"u{array.itemsize}")


def refused(call: Call, field: str, *words: str) -> None:
    """The call is refused for `field`, in words, by a new Binder and by one that has just taken a good call like it."""
    used = Binder(**LIMITS)
    good = make_call()
    (torch_call(good) if type(call.batch.q).__module__ == "torch" else good).bind(used)
    for binder in (Binder(**LIMITS), used):
        with pytest.raises(VerifyInputError) as caught:
            call.bind(binder)
        assert caught.value.field == field
        for word in (f"{field} is ", ", expected ", *words):
            assert word in str(caught.value)
