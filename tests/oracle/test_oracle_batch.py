"""Ragged batches: layouts, poison, and the read-back probe on the oracle itself."""

import enum
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

import oracle
from tests.cases import SHAPES, Shape, make_batch
from tests.probe import attended, make_probe, should_attend
from tests.strategies import batches


def masks_of(batch):
    return [oracle.tree_mask(batch, b) for b in range(batch.bs)]


def with_layout(batch, layout, dtype=np.bool_):
    """The same masks in another layout."""
    pieces, starts = [], [0]
    for mask, length in zip(masks_of(batch), batch.prefix_lengths, strict=True):
        wide = np.concatenate([np.zeros((len(mask), length), bool), mask], axis=1)
        pieces.append((wide if layout == "FULL_MASK" else mask).ravel())
        starts.append(starts[-1] + pieces[-1].size)
    return replace(
        batch,
        mask_layout=layout,
        custom_mask=np.concatenate(pieces).astype(dtype),
        mask_indptr=np.array(starts),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.id)
def test_poison_is_never_read(shape: Shape):
    """Batches are full of NaN and garbage; none of it shows, and shapes and empty rows are right."""
    batch = shape.make(1, tree="shuffled", blind=0.2)
    out, lse = oracle.verify_batch(batch)
    assert out.shape == (batch.N, batch.H, 512)
    assert lse.shape == (batch.N, batch.H)
    assert np.isfinite(out).all()
    empty = np.zeros(batch.N, bool)
    for b, mask in enumerate(masks_of(batch)):
        if batch.prefix_lengths[b] == 0:
            empty[batch.qo_indptr[b] : batch.qo_indptr[b + 1]] = ~mask.any(axis=1)
    np.testing.assert_array_equal(lse == -np.inf, np.broadcast_to(empty[:, None], lse.shape))
    assert np.all(out[empty] == 0)


@given(batch=batches())
@settings(max_examples=30, deadline=None)
def test_parts_merge_to_the_whole(batch):
    whole = oracle.verify_batch(batch)
    out, lse = oracle.merge([oracle.verify_batch(batch, part) for part in ("PREFIX", "TAIL")])
    np.testing.assert_allclose(out, whole[0], rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-12)


@given(batch=batches(heads=(2,)))
@settings(max_examples=30, deadline=None)
def test_probe_reads_back_the_masks(batch):
    probe = make_probe(batch)
    out, lse = oracle.verify_batch(probe)
    want = should_attend(probe, masks_of(probe))
    np.testing.assert_array_equal(attended(out), want)
    sizes = want.sum(axis=2)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(sizes), rtol=1e-14)


def test_probe_windows_reach_every_key():
    batch = make_batch(3, prefix=(700,), drafts=(6,), H=1, tree="shuffled")
    for first in (0, 512):
        out, _ = oracle.verify_batch(make_probe(batch, first))
        np.testing.assert_array_equal(attended(out), should_attend(batch, masks_of(batch), first))


def test_probe_catches_a_wrong_stride():
    """Rows of stride L instead of L + T, the origin of this project, give other sets."""
    batch = make_batch(4, prefix=(20,), drafts=(9,), H=1, tree="tree", stale=200)
    probe = make_probe(batch)
    wrong = np.zeros((9, 9), bool)
    for i in range(9):
        for j in range(9):
            wrong[i, j] = batch.custom_mask[i * 20 + 20 + j]
    assert not np.array_equal(should_attend(probe, [wrong]), attended(oracle.verify_batch(probe)[0]))


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
@pytest.mark.parametrize("layout", ["FULL_MASK", "QLEN_ONLY"])
def test_layouts_and_dtypes_agree(layout, dtype):
    batch = make_batch(5, prefix=(7, 0, 30), drafts=(4, 9, 1), tree="random")
    a, b = oracle.verify_batch(batch), oracle.verify_batch(with_layout(batch, layout, dtype))
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[1], b[1])


def test_chain_layout_is_a_chain_mask():
    chain = make_batch(6, prefix=(5,), drafts=(4,), mask_layout="CHAIN")
    np.testing.assert_array_equal(oracle.tree_mask(chain, 0), np.tri(4, dtype=bool))
    masked = make_batch(6, prefix=(5,), drafts=(4,), tree="chain")
    np.testing.assert_array_equal(oracle.tree_mask(masked, 0), np.tri(4, dtype=bool))


def test_enum_members_count_by_name():
    layout = enum.Enum("MaskLayout", ["FULL_MASK", "QLEN_ONLY"])
    parts = enum.Enum("Parts", ["ALL", "PREFIX"])
    batch = make_batch(7)
    a = oracle.verify_batch(batch, "PREFIX")
    b = oracle.verify_batch(replace(batch, mask_layout=layout.FULL_MASK), parts.PREFIX)
    np.testing.assert_array_equal(a[0], b[0])


def test_requests_do_not_touch_each_other():
    """Each request alone gives the bits that it gives in the batch."""
    batch = make_batch(8, prefix=(7, 0, 30), drafts=(4, 9, 1), tree="random")
    whole = oracle.verify_batch(batch)
    for b, request in enumerate(oracle.requests(batch)):
        out, lse = oracle.attention(request.q, request.rows, request.k, request.mask, batch.sm_scale)
        rows = slice(int(batch.qo_indptr[b]), int(batch.qo_indptr[b + 1]))
        np.testing.assert_array_equal(whole[0][rows], out)
        np.testing.assert_array_equal(whole[1][rows], lse)


def test_rows_without_a_slot_list():
    batch = make_batch(9, prefix=(7, 12), drafts=(4, 9))
    rows = batch.kv_pool[batch.kv_indices[:19]]
    direct = oracle.Batch(
        batch.q,
        batch.k,
        rows,
        batch.qo_indptr,
        batch.kv_indptr,
        None,
        batch.custom_mask,
        batch.mask_indptr,
        batch.sm_scale,
        batch.mask_layout,
    )
    np.testing.assert_array_equal(oracle.verify_batch(batch)[0], oracle.verify_batch(direct)[0])


@pytest.mark.parametrize(
    ("options", "parts", "message"),
    [({"mask_layout": "ROWS"}, "ALL", "mask_layout: found ROWS"), ({}, "HEAD", "parts: found HEAD")],
)
def test_unknown_names_are_refused(options, parts, message):
    batch = replace(make_batch(0), **options)
    for call in (oracle.verify_batch, oracle.bf16_verify_batch, oracle.error_budget):
        with pytest.raises(ValueError, match=message):
            call(batch, parts)
