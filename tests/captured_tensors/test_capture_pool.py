"""The compact pool: rows where the slots say, NaN everywhere else."""

import numpy as np
import pytest

from captured_tensors import CaptureCase, load_manifest, scatter_pool
from tests.capture_files import small_case, small_meta, small_parts

CASES = load_manifest()
ids = [case.name for case in CASES]


def bits(array):
    return array.view(np.uint16)


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_rows_are_where_the_slots_say(case, seed):
    pool = scatter_pool(case, permute_seed=seed)
    used = case.kv_indptr[-1]
    np.testing.assert_array_equal(bits(pool.kv_pool[pool.kv_indices[:used]]), bits(case.prefix_rows))
    np.testing.assert_array_equal(bits(pool.kv_pool[pool.out_cache_loc]), bits(case.tail_rows))
    assert pool.kv_indices.dtype == case.kv_indices.dtype
    assert pool.out_cache_loc.dtype == case.out_cache_loc.dtype


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_what_the_case_does_not_own_is_nan(case, seed):
    pool = scatter_pool(case, permute_seed=seed)
    used = case.kv_indptr[-1]
    foreign = np.ones(len(pool.kv_pool), bool)
    foreign[pool.kv_indices[:used]] = False
    foreign[pool.out_cache_loc] = False
    assert foreign[0]
    assert foreign.sum() >= 8
    assert np.isnan(pool.kv_pool[foreign].astype(np.float32)).all()
    stale = pool.kv_indices[used:]
    assert len(stale) == len(case.kv_indices) - used
    assert foreign[stale].all()
    assert len(pool.kv_pool) < 5 * (used + case.N) + 16


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_order_and_runs_stay(case):
    pool = scatter_pool(case)
    used = case.kv_indptr[-1]
    old = np.diff(np.concatenate([case.kv_indices[:used], case.out_cache_loc]))
    new = np.diff(np.concatenate([pool.kv_indices[:used], pool.out_cache_loc]))
    np.testing.assert_array_equal(np.sign(old), np.sign(new))
    np.testing.assert_array_equal(old == 1, new == 1)


def test_permutation_moves_every_row_and_keeps_the_size():
    for case in CASES:
        plain, moved = scatter_pool(case), scatter_pool(case, permute_seed=5)
        assert len(plain.kv_pool) == len(moved.kv_pool)
        used = case.kv_indptr[-1]
        assert np.all(plain.kv_indices[:used] != moved.kv_indices[:used])
        assert np.all(plain.out_cache_loc != moved.out_cache_loc)
        again = scatter_pool(case, permute_seed=5)
        np.testing.assert_array_equal(moved.kv_indices, again.kv_indices)
        assert np.any(scatter_pool(case, permute_seed=6).kv_indices != moved.kv_indices)


def test_shared_slots_stay_shared():
    case = next(case for case in CASES if case.name.startswith("ngram-bs2-t9-prefix81"))
    used = case.kv_indptr[-1]
    for seed in (None, 1):
        new = scatter_pool(case, permute_seed=seed).kv_indices[:used]
        assert len(np.unique(new)) == len(np.unique(case.kv_indices[:used])) < used


@pytest.mark.parametrize("slots", [20, 25, 40, 5000])
def test_the_size_can_be_chosen(slots):
    case = small_case()
    for seed in (None, 2):
        pool = scatter_pool(case, slots=slots, permute_seed=seed)
        assert len(pool.kv_pool) == slots
        np.testing.assert_array_equal(bits(pool.kv_pool[pool.kv_indices[:9]]), bits(case.prefix_rows))


def test_too_few_slots_are_refused():
    with pytest.raises(ValueError, match="slots: found 19, expected at least 20"):
        scatter_pool(small_case(), slots=19)


def test_a_case_that_uses_the_sink():
    """Padding: a token written to slot 0 is found there, in every permutation."""
    parts = small_parts()
    parts["out_cache_loc"] = np.array([0, *range(501, 509)])
    case = CaptureCase(name="padded", meta=small_meta(), **parts)
    for seed in (None, 1):
        pool = scatter_pool(case, permute_seed=seed)
        assert pool.out_cache_loc[0] == 0
        np.testing.assert_array_equal(bits(pool.kv_pool[0]), bits(case.tail_rows[0]))
