"""The verify and the merge kernel, run in lockstep, against the float64 oracle."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from captured_tensors import CaptureCase, load_manifest, scatter_pool
from tests.cases import SHAPES, Shape, SyntheticBatch, make_batch
from tests.lockstep.support import BY_NAME, FORMS, Array, check, run
from tests.probe import attended, make_probe, should_attend
from tests.strategies import batches
from tests.trees import tree_mask
from verify_numba.dims import D_QK
from verify_numba.geometry import Geometry

FEW = pytest.mark.parametrize("g", [BY_NAME["cluster72"], BY_NAME["single24"]], ids=lambda g: g.name)
MANY = pytest.mark.parametrize("g", FORMS, ids=lambda g: g.name)
RAGGED: dict[str, Any] = {"prefix": (37, 0, 100, 16), "drafts": (9, 5, 18, 1), "H": 3}
"""Requests of several row blocks, without a prefix, of whole tiles, of one token."""
SOME_SHAPES = [s for s in SHAPES if s.id not in ("nothing-at-all", "batch-of-none", "T-64", "H-64", "H-128")]
LARGE_SHAPES = [s for s in SHAPES if s.id in ("T-64", "H-64", "H-128")]


@functools.cache
def batch_of(seed: int, **options: Any) -> SyntheticBatch:
    """The same object for the same arguments, so that the oracle is asked once."""
    return make_batch(seed, **options)


@functools.cache
def made(shape: Shape) -> SyntheticBatch:
    return shape.make(1)


@FEW
@pytest.mark.parametrize("shape", SOME_SHAPES, ids=lambda s: s.id)
def test_shapes(shape: Shape, g: Geometry) -> None:
    batch = made(shape)
    check(batch, run(batch, g, check_races=True))


@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=lambda s: s.id)
def test_many_row_blocks(shape: Shape) -> None:
    batch = made(shape)
    check(batch, run(batch, BY_NAME["cluster72"], workers=2))


@MANY
@pytest.mark.parametrize("H", [1, 5, 8, 12])
def test_every_form_and_any_head_count(g: Geometry, H: int) -> None:
    batch = batch_of(2, prefix=(50, 3), drafts=(7, 2), H=H)
    check(batch, run(batch, g, check_races=True))


@FEW
@pytest.mark.parametrize("parts", ["PREFIX", "TAIL"])
def test_one_part_alone(g: Geometry, parts: str) -> None:
    batch = batch_of(3, blind=0.3, **RAGGED)
    check(batch, run(batch, g, parts=parts), parts)


@FEW
@pytest.mark.parametrize("workers", range(1, 10))
def test_any_split_gives_the_whole(g: Geometry, workers: int) -> None:
    batch = batch_of(4, **RAGGED)
    check(batch, run(batch, g, workers=workers, check_races=True))


@FEW
@pytest.mark.parametrize("min_tiles", [2, 7, 100])
def test_workers_left_without_tiles(g: Geometry, min_tiles: int) -> None:
    batch = batch_of(5, **RAGGED)
    check(batch, run(batch, g, workers=9, min_tiles=min_tiles))


@MANY
def test_many_requests_of_one_tile_before_longer_ones(g: Geometry) -> None:
    """A copy warp without work in short requests must not run ahead by a whole round of the stages."""
    batch = batch_of(15, prefix=(0,) * 16 + (40, 0, 0, 50), drafts=(9,) * 20, H=2)
    check(batch, run(batch, g, workers=1, check_races=True))


@FEW
@pytest.mark.parametrize("layout", ["FULL_MASK", "QLEN_ONLY", "CHAIN"])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_layouts_and_index_widths(g: Geometry, layout: str, index: type) -> None:
    batch = make_batch(
        6,
        mask_layout=layout,
        index_dtype=index,
        indptr_dtype=index,
        mask_dtype=np.uint8,
        q_layout="padded",
        **RAGGED,
    )
    check(batch, run(batch, g))


@FEW
@pytest.mark.parametrize("kind", ["shuffled", "random", "dense", "star"])
def test_the_mask_alone_decides(g: Geometry, kind: str) -> None:
    batch = batch_of(7, tree=kind, blind=0.2, **RAGGED)
    check(batch, run(batch, g))


@FEW
def test_rows_that_see_nothing_are_empty_rows(g: Geometry) -> None:
    batch = batch_of(8, prefix=(0, 0), drafts=(9, 20), blind=1.0)
    result = run(batch, g)
    assert not result.out.astype(np.float32).any()
    assert np.isneginf(result.lse).all()


@FEW
@pytest.mark.parametrize("std", [1e-3, 100.0])
def test_flat_and_steep_scores(g: Geometry, std: float) -> None:
    batch = batch_of(9, logit_std=std, **RAGGED)
    check(batch, run(batch, g))


@FEW
def test_scores_that_grow_tile_by_tile_rescale_each_time(g: Geometry) -> None:
    """The maximum rises by far more than the slack at every tile, and falls at the next request."""
    batch = batch_of(10, prefix=(96, 96), drafts=(4, 4), H=4, scattered=False)
    pool = batch.kv_pool.copy()
    for b in range(2):
        slots = batch.kv_indices[batch.kv_indptr[b] : batch.kv_indptr[b + 1]]
        steepness = np.arange(96) // 16 + 1
        pool[slots] = pool[slots] * (steepness if b == 0 else steepness[::-1])[:, None, None].astype(
            pool.dtype
        )
    batch = replace(batch, kv_pool=pool)
    check(batch, run(batch, g, workers=2, check_races=True))


@FEW
def test_the_probe_reads_back_the_keys_that_every_row_saw(g: Geometry) -> None:
    masks = [tree_mask(np.random.default_rng(b), t, "shuffled", 0.2) for b, t in enumerate((9, 20))]
    batch = make_probe(with_masks(batch_of(11, prefix=(40, 0), drafts=(9, 20)), masks))
    assert np.array_equal(attended(run(batch, g).out), should_attend(batch, masks))


def with_masks(batch: SyntheticBatch, masks: list[Array]) -> SyntheticBatch:
    """The batch in QLEN_ONLY layout with these masks."""
    starts = np.cumsum([0, *(mask.size for mask in masks)])
    flat = np.concatenate([mask.ravel() for mask in masks])
    return replace(batch, custom_mask=flat, mask_indptr=starts, mask_layout="QLEN_ONLY")


@FEW
def test_nan_in_drafts_that_a_row_does_not_see_leaves_it_bit_for_bit(g: Geometry) -> None:
    """Poison in pool slots is part of every batch here; this one adds it to draft rows."""
    masks = [tree_mask(np.random.default_rng(3), t, "shuffled") for t in (9, 20)]
    clean = with_masks(batch_of(12, prefix=(40, 0), drafts=(9, 20)), masks)
    k = clean.k.copy()
    poisoned = [4, 9 + 2, 9 + 17]
    for token, value in zip(poisoned, (np.nan, np.inf, np.nan), strict=True):
        k[token] = value
    k[poisoned[0], 0, :512] = 0.5  # NaN in the rotary part alone
    before, after = run(clean, g), run(replace(clean, k=k), g)
    sees = np.zeros(clean.N, bool)
    sees[:9] = masks[0][:, 4]
    sees[9:] = masks[1][:, [2, 17]].any(axis=1)
    assert sees.any()
    assert not sees.all()
    assert before.take(~sees).same_bits(after.take(~sees))
    assert not np.isfinite(after.out[sees].astype(np.float32)).any()


@FEW
def test_moving_every_slot_changes_no_bit(g: Geometry) -> None:
    batch = batch_of(13, **RAGGED)
    order = np.random.default_rng(0).permutation(len(batch.kv_pool))
    moved = np.empty_like(batch.kv_pool)
    moved[order] = batch.kv_pool
    assert run(batch, g).same_bits(run(replace(batch, kv_pool=moved, kv_indices=order[batch.kv_indices]), g))


def test_slots_beyond_32_bit_offsets() -> None:
    """From slot 3,728,270 on, rows lie 2^32 bytes into the pool; its untouched pages take no memory."""
    batch = make_batch(16, prefix=(40,), drafts=(4,), H=2)
    far = 3_728_270
    pool = np.zeros((far + len(batch.kv_pool), 1, D_QK), batch.kv_pool.dtype)
    pool[far:] = batch.kv_pool
    moved = replace(batch, kv_pool=pool, kv_indices=batch.kv_indices + far)
    for g in (BY_NAME["cluster16"], BY_NAME["single8"]):
        assert run(moved, g).same_bits(run(batch, g))


@FEW
def test_a_request_alone_is_what_it_is_in_a_batch(g: Geometry) -> None:
    """Bit for bit, where each is done by one worker."""
    batch = batch_of(14, **RAGGED)
    whole = run(batch, g, workers=1)
    for b in range(batch.bs):
        tokens = slice(int(batch.qo_indptr[b]), int(batch.qo_indptr[b + 1]))
        alone = replace(
            batch,
            q=batch.q[tokens],
            k=batch.k[tokens],
            qo_indptr=batch.qo_indptr[b : b + 2] - batch.qo_indptr[b],
            kv_indptr=batch.kv_indptr[b : b + 2] - batch.kv_indptr[b],
            kv_indices=batch.kv_indices[batch.kv_indptr[b] :],
            mask_indptr=None if batch.mask_indptr is None else batch.mask_indptr[b : b + 2],
        )
        assert run(alone, g, workers=1).same_bits(whole.take(tokens))


@given(batches())
@settings(max_examples=15, deadline=None)
def test_any_batch(batch: SyntheticBatch) -> None:
    if batch.bs and batch.N:
        check(batch, run(batch, BY_NAME["cluster24"], workers=2))
        check(batch, run(batch, BY_NAME["single24"], workers=2))


@FEW
@pytest.mark.parametrize("case", load_manifest(), ids=lambda case: case.name)
def test_captured_steps(case: CaptureCase, g: Geometry) -> None:
    pool = scatter_pool(case, permute_seed=1)
    batch = SyntheticBatch(
        q=case.q,
        k=case.k,
        kv_pool=pool.kv_pool,
        qo_indptr=case.qo_indptr,
        kv_indptr=case.kv_indptr,
        kv_indices=pool.kv_indices,
        custom_mask=case.custom_mask,
        mask_indptr=case.mask_indptr,
        sm_scale=case.meta.sm_scale,
        mask_layout=case.meta.mask_layout,
    )
    check(batch, run(batch, g, workers=4))
