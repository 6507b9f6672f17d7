"""Each rule about shapes, types, strides and places, broken alone, in NumPy arrays and in torch tensors."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import BF16
from tests.verifier.calls import ARRAYS, INPUTS, MAX_BS, H, T, as_torch, make_call, make_call_in, refused, torch_call
from verify_numba import MaskLayout

KINDS = ("numpy", "torch")
INDEX = ("qo_indptr", "kv_indptr", "kv_indices", "mask_indptr")


def misaligned(array, by):
    """The same contents at an address that is `by` bytes past a multiple of 64."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + by
    moved = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def spread(array, axis, by=2):
    """The same contents with `by` elements of room to the next one along `axis`."""
    shape = list(array.shape)
    shape[axis] *= by
    room = np.zeros(shape, array.dtype)
    view = room[tuple(slice(None, None, by if d == axis else 1) for d in range(array.ndim))]
    view[...] = array
    return view


def padded_rows(array, elements):
    room = np.zeros((*array.shape[:-1], array.shape[-1] + elements), array.dtype)
    room[..., : array.shape[-1]] = array
    return room[..., : array.shape[-1]]


def token_stride(array, elements):
    """The same contents with room behind each token, the heads of one close together."""
    flat = padded_rows(array.reshape(len(array), -1), elements)
    return np.lib.stride_tricks.as_strided(
        flat, array.shape, (flat.strides[0], array.itemsize * array.shape[-1], array.itemsize)
    )


RULES = {
    "q float16": ("q", lambda a: a.astype(np.float16), "float16", "bfloat16"),
    "q float32": ("q", lambda a: a.astype(np.float32), "float32", "bfloat16"),
    "q rank": ("q", lambda a: a.reshape(len(a), -1), "shape [13, 4608]", "[13, 8, 576]"),
    "q heads": ("q", lambda a: a[:, :4], "shape [13, 4, 576]", "[13, 8, 576]"),
    "q width": ("q", lambda a: a[..., :512], "shape [13, 8, 512]", "[13, 8, 576]"),
    "q last dimension": ("q", lambda a: spread(a, 2), "last dimension", "contiguous rows"),
    "q odd row stride": ("q", lambda a: padded_rows(a, 1), "strides", "multiples of 16 bytes"),
    "q row stride": ("q", lambda a: padded_rows(a, 4), "strides", "multiples of 16 bytes"),
    "q token stride": ("q", lambda a: token_stride(a, 4), "strides", "multiples of 16 bytes"),
    "q misaligned": ("q", lambda a: misaligned(a, 8), "at address", "multiples of 16 bytes"),
    "k float16": ("k", lambda a: a.astype(np.float16), "float16", "bfloat16"),
    "k rank": ("k", lambda a: a[:, 0], "shape [13, 576]", "[13, 1, 576]"),
    "k length": ("k", lambda a: a[:-1], "shape [12, 1, 576]", "[13, 1, 576]"),
    "k heads": ("k", lambda a: np.repeat(a, 2, 1), "shape [13, 2, 576]"),
    "k width": ("k", lambda a: a[..., :512], "shape [13, 1, 512]"),
    "k last dimension": ("k", lambda a: spread(a, 2), "last dimension", "contiguous rows"),
    "k row stride": ("k", lambda a: padded_rows(a, 4), "strides", "multiples of 16 bytes"),
    "k misaligned": ("k", lambda a: misaligned(a, 8), "at address", "multiples of 16 bytes"),
    "pool float16": ("kv_pool", lambda a: a.astype(np.float16), "float16", "bfloat16"),
    "pool bytes": ("kv_pool", lambda a: a.view(np.uint8), "uint8", "bfloat16"),
    "pool rank": ("kv_pool", lambda a: a[:, 0], "[slots, 1, 576]"),
    "pool pages": ("kv_pool", lambda a: a[:4].reshape(2, 2, 576), "shape [2, 2, 576]", "[slots, 1, 576]"),
    "pool width": ("kv_pool", lambda a: a[..., :512], "[slots, 1, 576]"),
    "pool last dimension": ("kv_pool", lambda a: spread(a, 2), "last dimension", "contiguous rows"),
    "pool row stride": ("kv_pool", lambda a: padded_rows(a, 4), "strides", "multiples of 16 bytes"),
    "pool misaligned": ("kv_pool", lambda a: misaligned(a, 8), "at address", "multiples of 16 bytes"),
    "qo_indptr empty": ("qo_indptr", lambda a: a[:0], "empty", "bs + 1 entries"),
    "kv_indptr length": ("kv_indptr", lambda a: a[:-1], "length 2", "3, as qo_indptr"),
    "mask_indptr length": ("mask_indptr", lambda a: a[:1], "length 1", "at least 2 starts"),
    "mask float32": ("custom_mask", lambda a: a.astype(np.float32), "float32", "bool or uint8"),
    "mask int8": ("custom_mask", lambda a: a.astype(np.int8), "int8", "bool or uint8"),
    "mask square": ("custom_mask", lambda a: a[:16].reshape(4, 4), "shape [4, 4]", "one dimension"),
    "mask stride": ("custom_mask", lambda a: spread(a, 0), "byte stride of 2", "contiguous"),
    "out float16": ("out", lambda a: a.astype(np.float16), "float16", "bfloat16"),
    "out float16, joined": ("out", lambda a: a.astype(np.float16).reshape(len(a), -1), "float16", "bfloat16"),
    "out length": ("out", lambda a: a[:-1], "shape [12, 8, 512]", "[13, 8, 512]"),
    "out width": ("out", lambda a: np.zeros((13, 8, 576), BF16), "shape [13, 8, 576]", "[13, 8, 512]"),
    "out heads first": ("out", lambda a: np.zeros((8, 13, 512), BF16).swapaxes(0, 1), "strides", "contiguous"),
    "out padded": ("out", lambda a: padded_rows(a, 64), "strides", "contiguous"),
    "lse float64": ("lse", lambda a: a.astype(np.float64), "float64", "float32"),
    "lse bfloat16": ("lse", lambda a: a.astype(BF16), "bfloat16", "float32"),
    "lse heads first": ("lse", lambda a: np.zeros((8, 13), np.float32).T, "strides", "contiguous"),
    "lse shape": ("lse", lambda a: np.zeros((8, 13), np.float32), "shape [8, 13]", "[13, 8]"),
    **{f"{name} float64": (name, lambda a: a.astype(np.float64), "float64", "int32 or int64") for name in INDEX},
    **{f"{name} int16": (name, lambda a: a.astype(np.int16), "int16", "int32 or int64") for name in INDEX},
    **{f"{name} rank": (name, lambda a: a[:, None], "1]", "one dimension") for name in INDEX},
    **{f"{name} stride": (name, lambda a: spread(a, 0), "byte stride of", "contiguous") for name in INDEX},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_named(rule, kind):
    field, change, *words = RULES[rule]
    call = make_call()
    call = call.put(**{field: change(call.get(field))})
    refused(torch_call(call) if kind == "torch" else call, field, *words)


@pytest.mark.parametrize("field", ARRAYS)
def test_backward_strides_are_refused(field):
    call = make_call()
    refused(call.put(**{field: call.get(field)[::-1]}), field, "stride")


def test_backward_heads_are_refused():
    call = make_call()
    refused(call.put(q=call.batch.q[:, ::-1]), "q", "none negative")


@pytest.mark.parametrize("field", [*INDEX, "out", "lse"])
def test_what_lies_across_its_own_alignment_is_refused(field):
    call = make_call()
    refused(call.put(**{field: misaligned(call.get(field), 1)}), field, "at address", "a multiple of")


@pytest.mark.parametrize("field", [name for name in ARRAYS if name != "custom_mask"])
def test_foreign_byte_order_is_refused(field):
    call = make_call()
    array = call.get(field)
    if array.dtype == BF16:
        array = array.view(np.uint16)
    refused(call.put(**{field: array.astype(array.dtype.newbyteorder())}), field, "foreign byte order")


@pytest.mark.parametrize("field", ARRAYS)
def test_what_is_no_array_is_refused(field):
    call = make_call()
    refused(call.put(**{field: call.get(field).tolist()}), field, "of type list", "a NumPy array or a torch tensor")


@pytest.mark.parametrize("field", [name for name in INPUTS if "mask" not in name] + ["out"])
def test_a_missing_array_is_refused(field):
    refused(make_call().put(**{field: None}), field, "NoneType")


@pytest.mark.parametrize("field", ["out", "lse"])
def test_a_read_only_result_is_refused(field):
    call = make_call()
    call.get(field).flags.writeable = False
    refused(call, field, "read-only", "writable")


@pytest.mark.parametrize("field", ["k", "kv_pool"])
def test_rows_too_far_apart_for_the_kernels_are_refused(field):
    call = make_call()
    array = call.get(field)
    far = np.lib.stride_tricks.as_strided(array, array.shape, (2**31, *array.strides[1:]))
    refused(call.put(**{field: far}), field, f"a row every {2**31} bytes", "at most")


def test_the_stride_of_a_single_row_does_not_matter():
    call = make_call(drafts=(1, 0), H=H)
    odd = {name: np.lib.stride_tricks.as_strided(call.get(name), (1, *call.get(name).shape[1:]),
                                                 (-6, *call.get(name).strides[1:])) for name in ("q", "k")}  # fmt: skip
    call.put(**odd).bind()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", INPUTS)
@pytest.mark.parametrize("written", ["out", "lse"])
def test_results_must_not_overlap_what_is_read(written, field, kind):
    call = make_call()
    target, other = call.get(written), call.get(field)
    room = np.zeros(target.nbytes + other.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 64
    # The result's last bytes are the other's first.
    after = start + target.nbytes - 16
    shared = {
        written: room[start:][: target.nbytes].view(target.dtype).reshape(target.shape),
        field: room[after:][: other.nbytes].view(other.dtype).reshape(other.shape),
    }
    call = call.put(**shared)
    refused(torch_call(call) if kind == "torch" else call, written, f"overlapping {field}", "memory of its own")


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_results_must_not_overlap(kind):
    call = make_call()
    lse = call.out.reshape(-1)[: 2 * call.lse.size].view(np.float32).reshape(call.lse.shape)
    call = call.put(lse=lse)
    refused(torch_call(call) if kind == "torch" else call, "out", "overlapping lse")


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_in_one_allocation_do_not_overlap(kind):
    call = make_call_in(kind)
    room = np.zeros(2 * call.out.size if kind == "numpy" else 2 * call.out.numel(), BF16)
    k_size = 13 * 576
    k, out = room[:k_size].reshape(13, 1, 576), room[k_size : k_size + 13 * H * 512].reshape(13, H, 512)
    if kind == "torch":
        k, out = as_torch(k), as_torch(out)
    binder_sees = call.put(k=k, out=out).bind()
    assert binder_sees[1][8] == binder_sees[1][1] + 2 * k_size


@pytest.mark.parametrize(
    "scale",
    [
        float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 0, -0.5, 1e39, 4e-46, 1e-40, "0.1", None, 1j,
        np.float32("nan"), [0.1],
    ],  # fmt: skip
    ids=repr,
)
def test_a_scale_that_float32_does_not_have_above_zero_is_refused(scale):
    refused(make_call().put(sm_scale=scale), "sm_scale", repr(scale), "a number from 1e-37 to 1e+38")


@pytest.mark.parametrize("scale", [0.13, 1, 1e-37, 1e38, np.float32(0.25), np.float64(0.25)], ids=repr)
def test_any_other_scale_is_taken_as_it_is(scale):
    bound = make_call().put(sm_scale=scale).bind()
    assert type(bound[2]) is float
    assert bound[2] == scale


@pytest.mark.parametrize("field", ["custom_mask", "mask_indptr"])
@pytest.mark.parametrize("layout", [MaskLayout.FULL_MASK, MaskLayout.QLEN_ONLY], ids=lambda x: x.name)
def test_a_layout_with_a_mask_needs_it(layout, field):
    refused(make_call().put(mask_layout=layout, **{field: None}), field, f"an array with mask_layout {layout.name}")


@pytest.mark.parametrize("field", ["custom_mask", "mask_indptr"])
def test_a_chain_takes_no_mask(field):
    other = {"custom_mask", "mask_indptr"} - {field}
    call = make_call().put(mask_layout=MaskLayout.CHAIN, **dict.fromkeys(other))
    refused(call, field, "given", "None with mask_layout CHAIN")


@pytest.mark.parametrize("layout", ["FULL_MASK", 0, None])
def test_a_layout_is_a_mask_layout(layout):
    refused(make_call().put(mask_layout=layout), "mask_layout", repr(layout), "a MaskLayout")


def test_limits_are_inclusive():
    make_call(prefix=(3,) * MAX_BS, drafts=(T,) * MAX_BS).bind()
    refused(make_call(prefix=(3,) * (MAX_BS + 1), drafts=(1,) * (MAX_BS + 1)), "qo_indptr", "5 requests", "max_bs = 4")
    refused(make_call(drafts=(T, T + 1)), "q", "19 draft tokens", "2 requests of T = 9")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        {"mask_layout": "QLEN_ONLY"},
        {"mask_layout": "CHAIN"},
        {"mask_dtype": np.uint8},
        {"index_dtype": np.int32},
        {"indptr_dtype": np.int64},
        {"q_layout": "heads-first"},
        {"q_layout": "padded"},
        {"prefix": (0, 0)},
        {"drafts": (0, 0)},
        {"prefix": (), "drafts": ()},
    ],
    ids=str,
)
def test_what_the_contract_allows_is_taken(kind, change):
    call = make_call_in(kind, **change)
    form, addresses, _ = call.bind()
    assert form.bs == len(call.batch.qo_indptr) - 1
    assert form.N == call.batch.q.shape[0]
    item = 2
    strides = call.batch.q.strides if kind == "numpy" else [item * s for s in call.batch.q.stride()]
    assert (form.q_token_stride, form.q_head_stride) == tuple(strides[:2])
    assert addresses[6:8] == (0, 0) or call.batch.mask_layout is not MaskLayout.CHAIN
    assert call.put(lse=None).bind()[1][9] == 0


def test_out_may_have_its_heads_joined():
    call = make_call()
    joined = call.put(out=call.out.reshape(len(call.out), -1))
    assert joined.bind()[1] == call.bind()[1]
