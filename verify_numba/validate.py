"""What a call must be, one message a rule. `check_call` looks at shapes, types and places only, so it never waits for a
GPU; `check_values` reads what the tensors hold, and does wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from verify_numba.arrays import ITEM_BYTES, View, host_array, view
from verify_numba.batch import MaskLayout, VerifyBatch
from verify_numba.dims import D_QK, D_V
from verify_numba.errors import VerifyInputError
from verify_numba.geometry import TILE
from verify_numba.kernels.work import KV_WIDE, MASK_WIDE, QO_WIDE, SLOTS_WIDE

LONGEST = 2**31 - 1 - TILE
"""Most prefix tokens of a batch: their numbers are 32-bit in the kernels, offsets are 64-bit."""
WIDEST = 2**31 - 16
"""Most bytes from one row of k or kv_pool to the next: the kernels multiply a 32-bit stride by a 32-bit slot."""
MIN_SCALE, MAX_SCALE = 1e-37, 1e38
"""The kernels scale in float32, and in base 2: what is 0 there would turn a masked key's -inf to NaN."""
INDEX = ("int32", "int64")
LOAD_BYTES = 16
"""What addresses and strides of q, k and kv_pool must be multiples of: as wide as the kernels load and copy."""


Addresses = tuple[int, int, int, int, int, int, int, int, int, int]
"""Where the arrays of a call lie, in the order of `Views`; 0 where one is absent."""


class Views(NamedTuple):
    """The arrays of a call."""

    q: View
    k: View
    kv_pool: View
    qo_indptr: View
    kv_indptr: View
    kv_indices: View
    custom_mask: View | None
    mask_indptr: View | None
    out: View | None = None
    lse: View | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """What follows from the shapes, types and strides of a call's arrays. Strides are bytes."""

    bs: int
    N: int
    q_token_stride: int
    q_head_stride: int
    k_stride: int
    pool_stride: int
    widths: int
    mask_layout: int
    spans: tuple[int, ...]
    """Bytes from the first to behind the last element of each of the `Views`; 0 where one is absent or empty."""


def check_call(
    batch: VerifyBatch, out: Any, lse: Any | None, *, max_bs: int, T: int, H: int, device: int
) -> tuple[Form, Addresses]:
    """All rules but those about contents and sm_scale; the call's form and its addresses (0: absent).

    Raises VerifyInputError, naming the field.
    """
    views = _check_batch(batch, H)
    bs, N = views.qo_indptr.shape[0] - 1, views.q.shape[0]
    if bs > max_bs:
        raise VerifyInputError("qo_indptr", f"for {bs} requests", f"at most max_bs = {max_bs}")
    if N > bs * T:
        raise VerifyInputError("q", f"{N} draft tokens", f"at most {bs} requests of T = {T}")
    views = views._replace(out=_results("out", out, (N, H, D_V), "bfloat16"))
    if lse is not None:
        views = views._replace(lse=_results("lse", lse, (N, H), "float32"))
    for field, one in zip(Views._fields, views, strict=True):
        if one is not None and one.device != device:
            raise VerifyInputError(field, f"on {_place(one.device)}", f"on {_place(device)}")
    addresses: Any = tuple([0 if one is None else one.address for one in views])
    spans = tuple([0 if one is None else one.nbytes_spanned for one in views])
    _apart(addresses, spans)
    form = Form(
        bs, N, views.q.strides[0], views.q.strides[1], views.k.strides[0], views.kv_pool.strides[0],
        _widths(views), batch.mask_layout.value, spans,
    )  # fmt: skip
    return form, addresses


def check_scale(scale: Any) -> float:
    """`sm_scale` as a float. Raises VerifyInputError."""
    if isinstance(scale, int | float | np.floating) and MIN_SCALE <= scale <= MAX_SCALE:
        return float(scale)
    raise VerifyInputError("sm_scale", repr(scale), f"a number from {MIN_SCALE:g} to {MAX_SCALE:g}")


def _check_batch(batch: VerifyBatch, H: int | str = "H") -> Views:
    """The views of a batch; out and lse are left None."""
    q, k, pool = view("q", batch.q), view("k", batch.k), view("kv_pool", batch.kv_pool)
    qo, kv, slots = (
        _flat("qo_indptr", batch.qo_indptr, INDEX), _flat("kv_indptr", batch.kv_indptr, INDEX),
        _flat("kv_indices", batch.kv_indices, INDEX),
    )  # fmt: skip
    bs = qo.shape[0] - 1
    if bs < 0:
        raise VerifyInputError("qo_indptr", "empty", "bs + 1 entries")
    if kv.shape[0] != bs + 1:
        raise VerifyInputError("kv_indptr", f"of length {kv.shape[0]}", f"{bs + 1}, as qo_indptr")
    N = q.shape[0] if q.shape else 0
    _shape("q", q, (N, H, D_QK), "bfloat16")
    _rows("q", q, LOAD_BYTES)
    _shape("k", k, (N, 1, D_QK), "bfloat16")
    _rows("k", k, LOAD_BYTES, WIDEST)
    _shape("kv_pool", pool, ("slots", 1, D_QK), "bfloat16")
    _rows("kv_pool", pool, LOAD_BYTES, WIDEST)
    return Views(q, k, pool, qo, kv, slots, *_mask(batch, bs))


def _mask(batch: VerifyBatch, bs: int) -> tuple[View | None, View | None]:
    layout = batch.mask_layout
    if not isinstance(layout, MaskLayout):
        raise VerifyInputError("mask_layout", repr(layout), "a MaskLayout")
    for field in ("custom_mask", "mask_indptr"):
        if (getattr(batch, field) is None) != (layout is MaskLayout.CHAIN):
            found, expected = ("given", "None") if layout is MaskLayout.CHAIN else (None, "an array")
            raise VerifyInputError(field, found, f"{expected} with mask_layout {layout.name}")
    if layout is MaskLayout.CHAIN:
        return None, None
    mask = _flat("custom_mask", batch.custom_mask, ("bool", "uint8"))
    starts = _flat("mask_indptr", batch.mask_indptr, INDEX)
    if starts.shape[0] < bs:
        raise VerifyInputError("mask_indptr", f"of length {starts.shape[0]}", f"at least {bs} starts")
    return mask, starts


def _results(field: str, array: Any, shape: tuple[int, ...], dtype: str) -> View:
    """An array to be written: of `shape`, or (for out) of that shape with its last two dimensions joined."""
    target = view(field, array)
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise VerifyInputError(field, "read-only", "writable")
    if len(shape) == 2 or target.shape != (shape[0], shape[1] * shape[2]):
        _shape(field, target, shape, dtype)
    _dense(field, target, dtype)
    return target


def _widths(views: Views) -> int:
    """The bits that say which index arrays are int64."""
    bits = (
        (views.qo_indptr, QO_WIDE), (views.kv_indptr, KV_WIDE), (views.kv_indices, SLOTS_WIDE),
        (views.mask_indptr, MASK_WIDE),
    )  # fmt: skip
    return sum(bit for one, bit in bits if one is not None and one.dtype == "int64")


def _place(device: int) -> str:
    return "the host" if device < 0 else f"cuda:{device}"


def _type(field: str, array: View, *dtypes: str) -> None:
    if array.dtype not in dtypes:
        raise VerifyInputError(field, array.dtype, " or ".join(dtypes))


def _shape(field: str, array: View, shape: tuple[int | str, ...], dtype: str) -> None:
    """Of that type and shape; a name in `shape` stands for any number."""
    _type(field, array, dtype)
    if len(array.shape) != len(shape) or any(
        n != wanted for n, wanted in zip(array.shape, shape, strict=True) if not isinstance(wanted, str)
    ):
        raise VerifyInputError(
            field, f"of shape {list(array.shape)}", f"[{', '.join(str(n) for n in shape)}]"
        )


def _rows(field: str, array: View, multiple: int, widest: int | None = None) -> None:
    """Rows of D_QK contiguous numbers, at strides and an address that `multiple`-byte copies can take."""
    if 0 in array.shape:
        return
    if array.strides[-1] != ITEM_BYTES[array.dtype]:
        raise VerifyInputError(
            field, f"strided in its last dimension ({array.strides[-1]} bytes)", "contiguous rows"
        )
    strides = [stride for n, stride in zip(array.shape[:-1], array.strides[:-1], strict=True) if n > 1]
    if any(stride % multiple or stride < 0 for stride in (array.address, *strides)):
        raise VerifyInputError(
            field, f"at address {array.address:#x} with byte strides {list(array.strides)}",
            f"an address and strides that are multiples of {multiple} bytes, none negative",
        )  # fmt: skip
    if widest is not None and max(strides, default=0) > widest:
        raise VerifyInputError(field, f"with a row every {array.strides[0]} bytes", f"at most {widest}")
    _backed(field, array)


def _flat(field: str, given: Any, dtypes: tuple[str, ...]) -> View:
    array = view(field, given)
    _type(field, array, *dtypes)
    if len(array.shape) != 1:
        raise VerifyInputError(field, f"of shape {list(array.shape)}", "one dimension")
    if array.shape[0] > 1 and array.strides[0] != ITEM_BYTES[array.dtype]:
        raise VerifyInputError(field, f"with a byte stride of {array.strides[0]}", "contiguous")
    _aligned(field, array)
    return array


def _dense(field: str, array: View, dtype: str) -> None:
    _type(field, array, dtype)
    expected = ITEM_BYTES[dtype]
    for n, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if n > 1 and 0 not in array.shape and stride != expected:
            raise VerifyInputError(field, f"with byte strides {list(array.strides)}", "contiguous")
        expected *= n
    _aligned(field, array)


def _aligned(field: str, array: View) -> None:
    size = ITEM_BYTES[array.dtype]
    if array.address % size and 0 not in array.shape:
        raise VerifyInputError(field, f"at address {array.address:#x}", f"a multiple of {size} bytes")
    _backed(field, array)


def _backed(field: str, array: View) -> None:
    if array.address == 0 and 0 not in array.shape:
        raise VerifyInputError(field, "without memory", "a tensor whose storage is not freed")


def _apart(addresses: Addresses, spans: tuple[int, ...]) -> None:
    """Blocks write results while others still read: nothing that is written may overlap anything else."""
    for written in (Views._fields.index("out"), Views._fields.index("lse")):
        low, high = addresses[written], addresses[written] + spans[written]
        for other, (address, span) in enumerate(zip(addresses, spans, strict=True)):
            if span and address < high and low < address + span and other != written:
                raise VerifyInputError(
                    Views._fields[written], f"overlapping {Views._fields[other]}", "memory of its own"
                )


def check_values(batch: VerifyBatch, T: int | None = None) -> None:
    """Check what the tensors hold: indptrs, slots, the mask's size. Copies them to the host, so it waits for a GPU.

    T is the most draft tokens that a request may have, as `Verifier` was told. Raises VerifyInputError.
    `Verifier.verify` never does this: there a wrong slot reads a wrong row, or faults, and draft tokens beyond T get no
    result.
    """
    views = _check_batch(batch)
    check_scale(batch.sm_scale)
    slots = views.kv_pool.shape[0]
    indices = host_array(batch.kv_indices)
    qo, kv = (host_array(indptr).astype(np.int64) for indptr in (batch.qo_indptr, batch.kv_indptr))
    _check_indptr("qo_indptr", qo, views.q.shape[0], "draft tokens of q")
    _check_indptr("kv_indptr", kv, len(indices), "entries of kv_indices")
    if T is not None and np.diff(qo).max(initial=0) > T:
        b = int(np.diff(qo).argmax())
        raise VerifyInputError("qo_indptr", f"for {qo[b + 1] - qo[b]} draft tokens in request {b}", f"at most T = {T}")
    used = indices[: kv[-1]]
    bad = np.flatnonzero((used < 0) | (used >= slots))
    if bad.size:
        raise VerifyInputError(f"kv_indices[{bad[0]}]", used[bad[0]], f"a slot from 0 to {slots - 1}")
    if views.custom_mask is not None:
        before = np.diff(kv) * (batch.mask_layout is MaskLayout.FULL_MASK)
        _check_mask(views.custom_mask.shape[0], host_array(batch.mask_indptr), np.diff(qo), before)


def _check_indptr(field: str, indptr: Any, most: int, of: str) -> None:
    if indptr[0] != 0:
        raise VerifyInputError(f"{field}[0]", indptr[0], 0)
    falls = np.flatnonzero(np.diff(indptr) < 0)
    if falls.size:
        b = int(falls[0])
        raise VerifyInputError(f"{field}[{b + 1}]", indptr[b + 1], f"at least {field}[{b}] = {indptr[b]}")
    if indptr[-1] > min(most, LONGEST):
        raise VerifyInputError(
            f"{field}[{len(indptr) - 1}]", indptr[-1], f"at most {min(most, LONGEST)}, the {of}"
        )


def _check_mask(cells: int, starts: Any, drafts: Any, columns_before: Any) -> None:
    """Each request's mask, `T` rows of `columns_before + T` cells, lies in the array."""
    for b, (T, before) in enumerate(zip(drafts.tolist(), columns_before.tolist(), strict=True)):
        end = int(starts[b]) + T * (T + before)
        if T and starts[b] < 0:
            raise VerifyInputError(f"mask_indptr[{b}]", starts[b], "at least 0")
        if T and end > cells:
            raise VerifyInputError("custom_mask", f"{cells} cells", f"at least {end}, for request {b}")
