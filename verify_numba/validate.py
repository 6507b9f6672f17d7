"""What a batch must be, one message a rule. `bind` looks at shapes, types and places only, so it costs microseconds and
never waits for a GPU; `check_values` reads what the tensors hold, and does wait."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from verify_numba.arrays import ITEM_BYTES, View, host_array, view
from verify_numba.batch import MaskLayout, VerifyBatch
from verify_numba.dims import D_QK, D_V
from verify_numba.errors import VerifyInputError
from verify_numba.geometry import TILE
from verify_numba.kernels.work import KV_WIDE, MASK_WIDE, QO_WIDE, SLOTS_WIDE

LONGEST = 2**31 - 1 - TILE
"""Most prefix tokens of a batch, and most slots: token and slot numbers are 32-bit in the kernels, offsets are 64-bit."""


class Bound(NamedTuple):
    """A checked batch as the numbers that the kernels take; addresses and byte strides."""

    bs: int
    N: int
    q: int
    q_token_stride: int
    q_head_stride: int
    k: int
    k_stride: int
    pool: int
    pool_stride: int
    qo_indptr: int
    kv_indptr: int
    kv_indices: int
    mask: int
    mask_indptr: int
    widths: int
    layout: int
    sm_scale: float
    out: int
    lse: int


def bind(batch: VerifyBatch, out: Any, lse: Any | None, *, max_bs: int, T: int, H: int, device: int) -> Bound:
    """Check everything but contents. Raises VerifyInputError, naming the field."""
    q, k, pool = view("q", batch.q), view("k", batch.k), view("kv_pool", batch.kv_pool)
    qo, kv, slots = (
        view("qo_indptr", batch.qo_indptr), view("kv_indptr", batch.kv_indptr), view("kv_indices", batch.kv_indices),
    )  # fmt: skip
    bs = _indptr("qo_indptr", qo)
    if bs > max_bs:
        raise VerifyInputError("qo_indptr", f"for {bs} requests", f"at most max_bs = {max_bs}")
    if _indptr("kv_indptr", kv) != bs:
        raise VerifyInputError("kv_indptr", f"of length {kv.shape[0]}", f"{bs + 1}, as qo_indptr")
    _flat("kv_indices", slots, ("int32", "int64"))
    N = q.shape[0] if q.shape else 0
    if N > bs * T:
        raise VerifyInputError("q", f"{N} draft tokens", f"at most {bs} requests of T = {T}")
    _shape("q", q, (N, H, D_QK), "bfloat16")
    _rows("q", q, 4)
    _shape("k", k, (N, 1, D_QK), "bfloat16")
    _rows("k", k, 16)
    _shape("kv_pool", pool, (pool.shape[0] if pool.shape else 0, 1, D_QK), "bfloat16")
    _rows("kv_pool", pool, 16)
    mask, mask_indptr = _mask(batch, bs)
    out_view = view("out", out)
    if out_view.shape != (N, H * D_V):
        _shape("out", out_view, (N, H, D_V), "bfloat16")
    _dense("out", out_view, "bfloat16")
    lse_view = None
    if lse is not None:
        lse_view = view("lse", lse)
        _shape("lse", lse_view, (N, H), "float32")
        _dense("lse", lse_view, "float32")
    _apart(out_view, lse_view, q, k, pool)
    named = (("q", q), ("k", k), ("kv_pool", pool), ("qo_indptr", qo), ("kv_indptr", kv), ("kv_indices", slots),
             ("custom_mask", mask), ("mask_indptr", mask_indptr), ("out", out_view), ("lse", lse_view))  # fmt: skip
    for field, one in named:
        if one is not None and one.device != device:
            raise VerifyInputError(field, f"on {_place(one.device)}", f"on {_place(device)}")
    scale = batch.sm_scale
    if not (isinstance(scale, float | int) and math.isfinite(scale) and scale > 0):
        raise VerifyInputError("sm_scale", scale, "a finite number above 0")
    widths = (
        QO_WIDE * (qo.dtype == "int64") + KV_WIDE * (kv.dtype == "int64") + SLOTS_WIDE * (slots.dtype == "int64")
        + MASK_WIDE * (mask_indptr is not None and mask_indptr.dtype == "int64")
    )  # fmt: skip
    return Bound(
        bs, N, q.address, q.strides[0], q.strides[1], k.address, k.strides[0], pool.address, pool.strides[0],
        qo.address, kv.address, slots.address, mask.address if mask else 0, mask_indptr.address if mask_indptr else 0,
        widths, batch.mask_layout.value, float(scale), out_view.address, lse_view.address if lse_view else 0,
    )  # fmt: skip


def _place(device: int) -> str:
    return "the host" if device < 0 else f"cuda:{device}"


def _shape(field: str, array: View, shape: tuple[int, ...], dtype: str) -> None:
    if array.dtype != dtype:
        raise VerifyInputError(field, array.dtype, dtype)
    if array.shape != shape:
        raise VerifyInputError(field, f"of shape {list(array.shape)}", f"{list(shape)}")


def _rows(field: str, array: View, multiple: int) -> None:
    """Rows of D_QK contiguous numbers, at strides and an address that `multiple`-byte copies can take."""
    if array.strides[-1] != ITEM_BYTES[array.dtype] and 0 not in array.shape:
        raise VerifyInputError(
            field, f"strided in its last dimension ({array.strides[-1]} bytes)", "contiguous rows"
        )
    for stride in (array.address, *array.strides[:-1]):
        if stride % multiple or stride < 0:
            raise VerifyInputError(
                field, f"at address {array.address:#x} with byte strides {list(array.strides)}",
                f"an address and strides that are multiples of {multiple} bytes, none negative",
            )  # fmt: skip


def _flat(field: str, array: View, dtypes: tuple[str, ...]) -> None:
    if array.dtype not in dtypes:
        raise VerifyInputError(field, array.dtype, " or ".join(dtypes))
    if len(array.shape) != 1:
        raise VerifyInputError(field, f"of shape {list(array.shape)}", "one dimension")
    if array.shape[0] > 1 and array.strides[0] != ITEM_BYTES[array.dtype]:
        raise VerifyInputError(field, f"with a byte stride of {array.strides[0]}", "contiguous")


def _indptr(field: str, array: View) -> int:
    _flat(field, array, ("int32", "int64"))
    if array.shape[0] < 1:
        raise VerifyInputError(field, "empty", "bs + 1 entries")
    return array.shape[0] - 1


def _dense(field: str, array: View, dtype: str) -> None:
    if array.dtype != dtype:
        raise VerifyInputError(field, array.dtype, dtype)
    expected = ITEM_BYTES[dtype]
    for n, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if n > 1 and stride != expected:
            raise VerifyInputError(field, f"with byte strides {list(array.strides)}", "contiguous")
        expected *= n


def _mask(batch: VerifyBatch, bs: int) -> tuple[View | None, View | None]:
    if not isinstance(batch.mask_layout, MaskLayout):
        raise VerifyInputError("mask_layout", repr(batch.mask_layout), "a MaskLayout")
    if batch.mask_layout is MaskLayout.CHAIN:
        for field in ("custom_mask", "mask_indptr"):
            if getattr(batch, field) is not None:
                raise VerifyInputError(field, "given", "None with mask_layout CHAIN")
        return None, None
    for field in ("custom_mask", "mask_indptr"):
        if getattr(batch, field) is None:
            raise VerifyInputError(field, None, f"an array with mask_layout {batch.mask_layout.name}")
    mask, mask_indptr = view("custom_mask", batch.custom_mask), view("mask_indptr", batch.mask_indptr)
    _flat("custom_mask", mask, ("bool", "uint8"))
    _flat("mask_indptr", mask_indptr, ("int32", "int64"))
    if mask_indptr.shape[0] < bs:
        raise VerifyInputError("mask_indptr", f"of length {mask_indptr.shape[0]}", f"at least {bs} starts")
    return mask, mask_indptr


def _apart(out: View, lse: View | None, *inputs: View) -> None:
    """Blocks write results while others still read: nothing that is written may overlap what is read."""
    written = [("out", out)] if lse is None else [("out", out), ("lse", lse)]
    for field, target in written:
        for other in (*inputs, *(v for name, v in written if name != field)):
            low, high = other.address, other.address + other.nbytes_spanned
            if target.address < high and low < target.address + target.nbytes_spanned:
                raise VerifyInputError(field, "overlapping another tensor of the call", "memory of its own")


def check_values(batch: VerifyBatch) -> None:
    """Check what the tensors hold: indptrs, slots, the mask's size. Copies them to the host, so it waits for a GPU.

    Raises VerifyInputError. `Verifier.verify` never does this; a wrong slot there reads a wrong row, or faults.
    """
    qo, kv = host_array(batch.qo_indptr), host_array(batch.kv_indptr)
    N, slots = batch.q.shape[0], batch.kv_pool.shape[0]
    _check_indptr("qo_indptr", qo, N, "draft tokens of q")
    indices = host_array(batch.kv_indices)
    _check_indptr("kv_indptr", kv, len(indices), "entries of kv_indices")
    used = indices[: kv[-1]]
    bad = np.flatnonzero((used < 0) | (used >= slots))
    if bad.size:
        raise VerifyInputError(f"kv_indices[{bad[0]}]", used[bad[0]], f"a slot from 0 to {slots - 1}")
    if batch.mask_layout is MaskLayout.CHAIN:
        return
    cells, starts = batch.custom_mask.shape[0], host_array(batch.mask_indptr)  # type: ignore[union-attr]
    full = batch.mask_layout is MaskLayout.FULL_MASK
    for b, (T, L) in enumerate(zip(np.diff(qo).tolist(), np.diff(kv).tolist(), strict=True)):
        end = int(starts[b]) + T * (T + (L if full else 0))
        if starts[b] < 0:
            raise VerifyInputError(f"mask_indptr[{b}]", starts[b], "at least 0")
        if T and end > cells:
            raise VerifyInputError("custom_mask", f"{cells} cells", f"at least {end}, for request {b}")


def _check_indptr(field: str, indptr: Any, most: int, of: str) -> None:
    if indptr[0] != 0:
        raise VerifyInputError(f"{field}[0]", indptr[0], 0)
    falls = np.flatnonzero(np.diff(indptr) < 0)
    if falls.size:
        b = int(falls[0])
        raise VerifyInputError(f"{field}[{b + 1}]", indptr[b + 1], f"at least {field}[{b}] = {indptr[b]}")
    if indptr[-1] > min(most, LONGEST):
        raise VerifyInputError(f"{field}[{len(indptr) - 1}]", indptr[-1], f"at most {most}, the {of}")
