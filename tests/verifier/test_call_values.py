"""`check_values`: what the tensors hold, each rule broken alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.strategies import batches
from tests.verifier.calls import as_torch, make_call, torch_call, verify_batch_of
from verify_numba import MaskLayout, VerifyInputError, check_values, validate

KINDS = ("numpy", "torch")
MASKED = ("FULL_MASK", "QLEN_ONLY")


def with_entry(array, at, value):
    changed = array.copy()
    changed[at] = value
    return changed


def refused(call, field, *words, T=None, kind="numpy"):
    call = torch_call(call) if kind == "torch" else call
    with pytest.raises(VerifyInputError) as caught:
        check_values(call.batch, T)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_good_batches_pass(synthetic):
    check_values(verify_batch_of(synthetic), synthetic.T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr"])
def test_an_indptr_starts_at_zero_never_falls_and_ends_inside(name, kind):
    call = make_call(prefix=(40, 7, 3), drafts=(9, 4, 2))
    indptr = call.get(name)
    refused(call.put(**{name: with_entry(indptr, 0, 1)}), f"{name}[0]", "is 1, expected 0", kind=kind)
    refused(call.put(**{name: with_entry(indptr, 0, -1)}), f"{name}[0]", "is -1, expected 0", kind=kind)
    falling = with_entry(indptr, 2, indptr[1] - 1)
    refused(call.put(**{name: falling}), f"{name}[2]", f"at least {name}[1] = {indptr[1]}", kind=kind)
    beyond = with_entry(indptr, 3, 10_000)
    refused(call.put(**{name: beyond}), f"{name}[3]", "is 10000", "at most", kind=kind)


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr"])
def test_a_fall_that_wraps_around_in_32_bits_is_seen(name):
    call = make_call(indptr_dtype=np.int32)
    refused(call.put(**{name: np.array([0, 2**31 - 1, -(2**31)], np.int32)}), f"{name}[2]", "at least")


def test_more_prefix_tokens_than_the_kernels_can_count_are_refused(monkeypatch):
    monkeypatch.setattr(validate, "LONGEST", 40)
    refused(make_call(prefix=(40, 7)), "kv_indptr[2]", "is 47", "at most 40")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("slot", [-1, "slots", 2**31 - 1, -(2**31)])
def test_a_slot_outside_the_pool_is_named(slot, index_dtype, kind):
    call = make_call(index_dtype=index_dtype)
    slots = len(call.batch.kv_pool)
    value = slots if slot == "slots" else slot
    wrong = with_entry(call.batch.kv_indices, 43, value)
    refused(call.put(kv_indices=wrong), "kv_indices[43]", f"is {value}", f"a slot from 0 to {slots - 1}", kind=kind)


def test_the_first_and_the_last_slot_are_good():
    call = make_call()
    for slot in (0, len(call.batch.kv_pool) - 1):
        check_values(call.put(kv_indices=with_entry(call.batch.kv_indices, 5, slot)).batch)


def test_stale_slots_behind_the_last_request_are_not_looked_at():
    call = make_call(stale=16)
    check_values(call.put(kv_indices=with_entry(call.batch.kv_indices, slice(47, None), -5)).batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", MASKED)
def test_a_mask_start_below_zero_is_named(layout, kind):
    call = make_call(mask_layout=layout)
    wrong = with_entry(call.batch.mask_indptr, 1, -3)
    refused(call.put(mask_indptr=wrong), "mask_indptr[1]", "is -3", "at least 0", kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", MASKED)
def test_a_mask_one_cell_too_short_is_refused(layout, kind):
    call = make_call(mask_layout=layout, stale=0)
    mask = call.batch.custom_mask
    check_values(call.batch)
    words = f"is {len(mask) - 1} cells", f"at least {len(mask)}, for request 1"
    refused(call.put(custom_mask=mask[:-1]), "custom_mask", *words, kind=kind)


def test_a_full_mask_read_as_tree_only_needs_less_and_the_reverse_more():
    call = make_call(stale=0)
    check_values(call.put(mask_layout=MaskLayout.QLEN_ONLY).batch)
    refused(make_call(stale=0, mask_layout="QLEN_ONLY").put(mask_layout=MaskLayout.FULL_MASK), "custom_mask", "cells")


@pytest.mark.parametrize("layout", MASKED)
def test_the_last_entry_of_mask_indptr_is_no_start(layout):
    call = make_call(mask_layout=layout)
    check_values(call.put(mask_indptr=with_entry(call.batch.mask_indptr, 2, -1)).batch)
    check_values(call.put(mask_indptr=call.batch.mask_indptr[:2]).batch)


def test_a_request_without_drafts_needs_no_mask():
    call = make_call(drafts=(9, 0))
    check_values(call.put(mask_indptr=with_entry(call.batch.mask_indptr, 1, 10**9)).batch)


@pytest.mark.parametrize("kind", KINDS)
def test_more_draft_tokens_in_one_request_than_a_verifier_takes(kind):
    call = make_call(prefix=(3, 3, 3), drafts=(4, 9, 5))
    check_values(call.batch, 9)
    refused(call, "qo_indptr", "9 draft tokens in request 1", "at most T = 8", T=8, kind=kind)


def test_the_shape_rules_come_first():
    call = make_call()
    refused(call.put(kv_indptr=call.batch.kv_indptr[:0]), "kv_indptr", "of length 0")
    refused(call.put(q=call.batch.q[:, 0]), "q", "[13, H, 576]")
    refused(call.put(custom_mask=None), "custom_mask", "None")
    refused(call.put(sm_scale=float("nan")), "sm_scale", "nan")


def test_a_chain_has_no_mask_to_check():
    check_values(make_call(mask_layout="CHAIN").batch)
    check_values(torch_call(make_call(mask_layout="CHAIN")).batch)


def test_a_batch_of_none_is_good():
    check_values(make_call(prefix=(), drafts=()).batch)
    empty = make_call(prefix=(0,), drafts=(2,))
    check_values(empty.put(kv_indices=empty.batch.kv_indices[:0], kv_pool=empty.batch.kv_pool[:0]).batch)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written(kind):
    call = make_call()
    before = {name: call.get(name).tobytes() for name in ("kv_indices", "qo_indptr", "kv_indptr", "mask_indptr")}
    frozen = [call.get(name) for name in before]
    if kind == "torch":
        check_values(call.put(**{name: as_torch(call.get(name)) for name in before}).batch)
    else:
        for array in frozen:
            array.flags.writeable = False
        check_values(call.batch)
    assert {name: array.tobytes() for name, array in zip(before, frozen, strict=True)} == before
