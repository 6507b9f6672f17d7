"""What a captured verify step must look like: one table of tensors, one message a broken rule.

Sizes: ``bs`` requests, ``N = qo_indptr[bs]`` draft tokens, ``H`` heads, ``P = kv_indptr[bs]`` prefix tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from verify_numba.dims import D_QK, D_V

if TYPE_CHECKING:
    from captured_tensors.meta import CaptureMeta

Array = np.ndarray[Any, np.dtype[Any]]

BF16 = np.dtype(ml_dtypes.bfloat16)
_INDEX = (np.dtype(np.int32), np.dtype(np.int64))
_MASK = (np.dtype(np.bool_), np.dtype(np.uint8))
_BF16 = (BF16,)

MASK_LAYOUTS = ("FULL_MASK", "QLEN_ONLY", "CHAIN")
SINK = 0
"""The pool slot that padding is written to; several tokens may share it."""

TENSORS: dict[str, tuple[tuple[np.dtype[Any], ...], tuple[int | str, ...]]] = {
    "q": (_BF16, ("N", "H", D_QK)),
    "k": (_BF16, ("N", 1, D_QK)),
    "v": (_BF16, ("N", 1, D_V)),
    "qo_indptr": (_INDEX, ("bs+1",)),
    "kv_indptr": (_INDEX, ("bs+1",)),
    "kv_indices": (_INDEX, (">=P",)),
    "custom_mask": (_MASK, ("any",)),
    "mask_indptr": (_INDEX, ("bs+1",)),
    "out_cache_loc": (_INDEX, ("N",)),
    "seq_lens": (_INDEX, ("bs",)),
    "req_pool_indices": (_INDEX, ("bs",)),
    "positions": (_INDEX, ("N",)),
    "prefix_rows": (_BF16, ("P", 1, D_QK)),
    "tail_rows": (_BF16, ("N", 1, D_QK)),
    "out_triton": (_BF16, ("N", "H*512")),
}
"""Tensor name to the dtypes it may have and its shape."""

OPTIONAL = frozenset({"out_triton"})
MASK_TENSORS = frozenset({"custom_mask", "mask_indptr"})


class CaptureError(ValueError):
    """A capture, its file or its manifest breaks the schema. The message names what, found and expected."""


def fail(field: str, found: object, expected: object) -> CaptureError:
    """The one form of every schema message."""
    return CaptureError(f"{field}: found {found}, expected {expected}")


def required_names(mask_layout: str) -> frozenset[str]:
    """The tensors that a case of this mask layout must have."""
    absent = MASK_TENSORS if mask_layout == "CHAIN" else frozenset()
    return frozenset(TENSORS) - OPTIONAL - absent


def check_names(names: frozenset[str], mask_layout: str) -> None:
    """Refuse missing and unknown tensors by name."""
    required = required_names(mask_layout)
    missing = sorted(required - names)
    if missing:
        raise CaptureError(f"tensors missing: {', '.join(missing)}")
    unknown = sorted(names - required - OPTIONAL)
    if unknown:
        raise CaptureError(f"unknown tensors: {', '.join(unknown)} (mask layout {mask_layout})")


def check_case(tensors: Mapping[str, Array], meta: CaptureMeta) -> None:
    """Check all tensors of one case against the schema and against each other.

    Entries of ``kv_indices`` behind ``kv_indptr[bs]`` and cells of ``custom_mask`` behind the last request
    are stale by nature: they are neither read nor judged. Floating-point contents may be anything.

    Raises:
        CaptureError: a tensor is missing, unknown, or breaks a rule.
    """
    check_names(frozenset(tensors), meta.mask_layout)
    for name, array in tensors.items():
        _check_dtype(name, array)
    for name in ("qo_indptr", "kv_indptr"):
        _check_indptr(name, tensors[name])
    sizes = {
        "bs": len(tensors["qo_indptr"]) - 1,
        "N": int(tensors["qo_indptr"][-1]),
        "H": meta.num_heads,
        "P": int(tensors["kv_indptr"][-1]),
    }
    for name, array in tensors.items():
        _check_shape(name, array, sizes)
    _check_lengths(tensors, meta)
    _check_slots(tensors, meta)
    if meta.mask_layout != "CHAIN":
        _check_mask(tensors, meta.mask_layout)
    _check_rows(tensors)


def _check_dtype(name: str, array: Array) -> None:
    dtypes, shape = TENSORS[name]
    if array.dtype not in dtypes:
        raise fail(name, f"dtype {array.dtype}", " or ".join(str(d) for d in dtypes))
    if array.ndim != len(shape):
        raise fail(name, f"rank {array.ndim} (shape {array.shape})", f"rank {len(shape)}")


def _check_indptr(name: str, indptr: Array) -> None:
    if len(indptr) == 0:
        raise fail(name, "no entry", "bs + 1 entries")
    if indptr[0] != 0:
        raise fail(name, f"first entry {indptr[0]}", 0)
    steps = np.diff(indptr.astype(np.int64))
    if np.any(steps < 0):
        b = int(np.argmax(steps < 0))
        raise fail(name, f"{indptr[b]} then {indptr[b + 1]} at entry {b + 1}", "entries that never fall")


def _check_shape(name: str, array: Array, sizes: Mapping[str, int]) -> None:
    named = {**sizes, "bs+1": sizes["bs"] + 1, "H*512": sizes["H"] * D_V}
    for axis, want in enumerate(TENSORS[name][1]):
        size = array.shape[axis]
        if want == "any":
            continue
        if want == ">=P":
            if size < sizes["P"]:
                raise fail(name, f"{size} entries", f"at least kv_indptr[bs] = {sizes['P']}")
        elif size != (want if isinstance(want, int) else named[want]):
            value = want if isinstance(want, int) else f"{want} = {named[want]}"
            raise fail(name, f"shape {array.shape}", f"{value} along axis {axis}")


def _check_lengths(tensors: Mapping[str, Array], meta: CaptureMeta) -> None:
    drafts = np.diff(tensors["qo_indptr"])
    if np.any(drafts > meta.max_extend_len):
        b = int(np.argmax(drafts))
        raise fail(
            "qo_indptr",
            f"{drafts[b]} draft tokens in request {b}",
            f"at most max_extend_len = {meta.max_extend_len}",
        )
    prefixes = np.diff(tensors["kv_indptr"].astype(np.int64))
    wrong = tensors["seq_lens"] != prefixes
    if np.any(wrong):
        b = int(np.argmax(wrong))
        raise fail(
            "seq_lens",
            f"{tensors['seq_lens'][b]} for request {b}",
            f"its prefix length in kv_indptr, {prefixes[b]}",
        )
    for name in ("req_pool_indices", "positions"):
        _check_range(name, tensors[name], None)


def _check_slots(tensors: Mapping[str, Array], meta: CaptureMeta) -> None:
    used = int(tensors["kv_indptr"][-1])
    _check_range("kv_indices", tensors["kv_indices"][:used], meta.pool_slots)
    _check_range("out_cache_loc", tensors["out_cache_loc"], meta.pool_slots)


def _check_range(name: str, values: Array, stop: int | None) -> None:
    bad = values < 0 if stop is None else (values < 0) | (values >= stop)
    if np.any(bad):
        at = int(np.argmax(bad))
        span = "0 or more" if stop is None else f"0 to {stop - 1} (pool_slots = {stop})"
        raise fail(name, f"{values[at]} at entry {at}", span)


def _check_mask(tensors: Mapping[str, Array], layout: str) -> None:
    starts = tensors["mask_indptr"][:-1].astype(np.int64)
    drafts = np.diff(tensors["qo_indptr"]).astype(np.int64)
    strides = drafts + (np.diff(tensors["kv_indptr"]) if layout == "FULL_MASK" else 0)
    ends = starts + drafts * strides
    if len(starts) and starts[0] != 0:
        raise fail("mask_indptr", f"first entry {starts[0]}", 0)
    early = starts[1:] < ends[:-1]
    if np.any(early):
        b = int(np.argmax(early)) + 1
        raise fail(
            "mask_indptr",
            f"request {b} starts at {starts[b]}",
            f"{ends[b - 1]} or more, the end of the request before it",
        )
    cells = len(tensors["custom_mask"])
    if len(ends) and ends[-1] > cells:
        raise fail("custom_mask", f"{cells} cells", f"at least {ends[-1]} for layout {layout}")


def _check_rows(tensors: Mapping[str, Array]) -> None:
    """The pool has one row a slot, the draft rows were written there, and a value is its key's first part."""
    if not same_bits(tensors["v"], tensors["k"][..., :D_V]):
        raise fail("v", "values that differ from k", f"the first {D_V} columns of k, bit for bit")
    slots = tensors["out_cache_loc"]
    kept = slots != SINK
    differ = np.any(_bits(tensors["tail_rows"]) != _bits(tensors["k"]), axis=(1, 2)) & kept
    if np.any(differ):
        i = int(np.argmax(differ))
        raise fail("tail_rows", f"row {i} (slot {slots[i]}) that differs from k", "k, bit for bit")
    used = int(tensors["kv_indptr"][-1])
    all_slots = np.concatenate([tensors["kv_indices"][:used].astype(np.int64), slots.astype(np.int64)])
    rows = np.concatenate([_bits(tensors["prefix_rows"]), _bits(tensors["tail_rows"])])
    _, first, inverse = np.unique(all_slots, return_index=True, return_inverse=True)
    twice = np.any(rows != rows[first[inverse]], axis=(1, 2))
    if np.any(twice):
        at = int(np.argmax(twice))
        raise fail("prefix_rows", f"two different rows for pool slot {all_slots[at]}", "one row a slot")


def same_bits(a: Array, b: Array) -> bool:
    """Whether two bf16 arrays agree bit for bit (NaN included)."""
    return bool(np.array_equal(_bits(a), _bits(b)))


def _bits(array: Array) -> Array:
    return array.view(np.uint16)
