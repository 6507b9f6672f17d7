"""Laws and values of the float64 attention of one request."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from tests.strategies import masks
from tests.trees import tree_mask
from verify_numba.dims import D_QK, D_V

SCALE = 0.1


def inputs(seed: int, t: int = 5, h: int = 3, length: int = 11):
    rng = np.random.default_rng(seed)
    q, rows, k = (rng.standard_normal(s) for s in ((t, h, D_QK), (length, 1, D_QK), (t, 1, D_QK)))
    return q, rows, k, tree_mask(rng, t, "random")


def by_hand(q, keys, scale):
    """One query over a list of keys with Python's own arithmetic."""
    scores = [scale * math.fsum(float(a) * float(b) for a, b in zip(q, key, strict=True)) for key in keys]
    total = math.fsum(math.exp(s) for s in scores)
    weights = [math.exp(s) / total for s in scores]
    columns = [math.fsum(w * float(key[c]) for w, key in zip(weights, keys, strict=True)) for c in range(D_V)]
    return columns, math.log(total)


def test_values_against_plain_python():
    q, rows, k, mask = inputs(0, t=3, h=2, length=4)
    out, lse = oracle.attention(q, rows, k, mask, SCALE)
    for i in range(3):
        keys = [*rows[:, 0], *(k[j, 0] for j in range(3) if mask[i, j])]
        for h in range(2):
            want, want_lse = by_hand(q[i, h], keys, SCALE)
            np.testing.assert_allclose(out[i, h], want, rtol=1e-12, atol=1e-14)
            assert lse[i, h] == pytest.approx(want_lse, rel=1e-13)


def test_lse_is_the_natural_logarithm():
    """With zero queries all n scores are 0: lse is ln n, out the mean of the values."""
    _, rows, k, _ = inputs(1)
    out, lse = oracle.attention(np.zeros((5, 3, D_QK)), rows, k, np.ones((5, 5), bool), SCALE)
    assert lse == pytest.approx(math.log(16))
    np.testing.assert_allclose(out[0, 0], np.concatenate([rows, k])[:, 0, :D_V].mean(axis=0), atol=1e-14)


@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(0, 11), max_size=5), mask=masks(5))
@settings(max_examples=40, deadline=None)
def test_split_equals_whole(seed, cuts, mask):
    """Any cut of the prefix, empty pieces included, and the tail merge to the whole, in any order."""
    q, rows, k, _ = inputs(seed)
    edges = [0, *sorted(cuts), 11]
    parts = [oracle.prefix(q, rows[a:b], SCALE) for a, b in itertools.pairwise(edges)]
    parts.append(oracle.tail(q, k, mask, SCALE))
    np.random.default_rng(seed).shuffle(parts)
    got, whole = oracle.merge(parts), oracle.attention(q, rows, k, mask, SCALE)
    np.testing.assert_allclose(got[0], whole[0], rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(got[1], whole[1], rtol=1e-13)


def test_order_of_keys_does_not_matter():
    q, rows, k, mask = inputs(2)
    order, draft = np.random.default_rng(3).permutation(11), np.random.default_rng(4).permutation(5)
    a = oracle.attention(q, rows, k, mask, SCALE)
    b = oracle.attention(q, rows[order], k[draft], mask[:, draft], SCALE)
    np.testing.assert_allclose(a[0], b[0], atol=1e-14)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-14)


def test_heads_are_independent():
    q, rows, k, mask = inputs(3)
    whole = oracle.attention(q, rows, k, mask, SCALE)
    one = oracle.attention(q[:, 1:2], rows, k, mask, SCALE)
    np.testing.assert_allclose(whole[0][:, 1], one[0][:, 0], atol=1e-13)


def test_nothing_is_inferred_from_causality():
    """Row 0 sees the last draft token only."""
    q, rows, k, _ = inputs(4)
    mask = np.zeros((5, 5), bool)
    mask[0, 4] = True
    out, _ = oracle.attention(q, rows[:0], k, mask, SCALE)
    np.testing.assert_allclose(out[0], np.broadcast_to(k[4, 0, :D_V], (3, D_V)))


@pytest.mark.parametrize("part", ["whole", "prefix", "tail"])
def test_a_row_without_keys_is_zero_and_minus_infinity(part):
    q, rows, k, _ = inputs(5)
    blind = np.zeros((5, 5), bool)
    out, lse = {
        "whole": lambda: oracle.attention(q, rows[:0], k, blind, SCALE),
        "prefix": lambda: oracle.prefix(q, rows[:0], SCALE),
        "tail": lambda: oracle.tail(q, k, blind, SCALE),
    }[part]()
    assert np.all(out == 0)
    assert np.all(lse == -np.inf)


def test_merge_of_empty_parts():
    q, rows, _, _ = inputs(6)
    part = oracle.prefix(q, rows, SCALE)
    empty = (np.full_like(part[0], np.nan), np.full_like(part[1], -np.inf))
    out, lse = oracle.merge([empty, part, empty])
    np.testing.assert_array_equal(out, part[0])
    np.testing.assert_allclose(lse, part[1], rtol=1e-15)
    out, lse = oracle.merge([empty, empty])
    assert np.all(out == 0)
    assert np.all(lse == -np.inf)
    with pytest.raises(ValueError, match="parts: found none"):
        oracle.merge([])


def test_merge_passes_nan_on():
    q, rows, _, _ = inputs(6)
    part = oracle.prefix(q, rows, SCALE)
    lse = part[1].copy()
    lse[2, 1] = np.nan
    out, merged = oracle.merge([part, (part[0], lse)])
    bad = np.zeros(lse.shape, bool)
    bad[2, 1] = True
    np.testing.assert_array_equal(np.isnan(merged), bad)
    np.testing.assert_array_equal(np.isnan(out).all(axis=2), bad)


def test_masked_nan_reaches_only_the_rows_that_see_it():
    q, rows, k, _ = inputs(7)
    mask = np.tri(5, dtype=bool)
    clean = oracle.attention(q, rows, k, mask, SCALE)
    k[3] = np.nan
    out, lse = oracle.attention(q, rows, k, mask, SCALE)
    np.testing.assert_array_equal(out[:3], clean[0][:3])
    np.testing.assert_array_equal(lse[:3], clean[1][:3])
    assert np.isnan(out[3:]).all()
    assert np.isnan(lse[3:]).all()


@pytest.mark.parametrize("shift", [-6e4, 6e4])
def test_scores_far_from_zero(shift):
    """A score common to all keys moves the lse and nothing else, at any size."""
    q, rows, k, mask = inputs(8)
    q[..., -1], rows[..., -1], k[..., -1] = 0, 1, 1
    base = oracle.attention(q, rows, k, mask, SCALE)
    q[..., -1] = shift / SCALE
    out, lse = oracle.attention(q, rows, k, mask, SCALE)
    np.testing.assert_allclose(out, base[0], atol=1e-9)
    np.testing.assert_allclose(lse - shift, base[1], atol=1e-9)


def test_one_dominant_key():
    q, rows, _, _ = inputs(9)
    rows[4, 0] = 1e3 * q[0, 0]
    out, lse = oracle.prefix(q[:1, :1], rows, SCALE)
    np.testing.assert_array_equal(out[0, 0], rows[4, 0, :D_V])
    assert lse[0, 0] == pytest.approx(SCALE * 1e3 * float(q[0, 0] @ q[0, 0]))
