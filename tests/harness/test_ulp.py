import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from harness.ulp import bf16_ulp, row_ulp_error, ulp_error

ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(bfloat16)
FINITE = ALL_BF16[np.isfinite(ALL_BF16.astype(np.float32))]


def test_ulp_is_the_gap_to_the_next_bf16_number_everywhere():
    positive = np.sort(FINITE[FINITE.astype(np.float32) >= 0].astype(np.float64))
    gaps = np.diff(positive)
    keep = gaps > 0  # +0 and -0 both compare as 0
    np.testing.assert_array_equal(bf16_ulp(positive[:-1])[keep], gaps[keep])


@given(st.floats(-1e30, 1e30))
def test_rounding_is_off_by_half_an_ulp_at_most(x):
    rounded = np.array([x]).astype(np.float32).astype(bfloat16)
    # float64 -> float32 -> bf16 rounds twice: a hair above one half
    assert ulp_error(rounded, np.array([x]))[0] <= 0.5 + 2.0**-16


def test_the_next_number_is_one_ulp_away():
    one, above = np.array([0x3F80, 0x3F81], np.uint16).view(bfloat16).astype(np.float64)
    assert ulp_error(np.array([above]), np.array([one])) == 1.0


def test_signed_zeros_and_equal_infinities_are_no_distance_apart():
    got, ref = np.array([0.0, np.inf, -np.inf]), np.array([-0.0, np.inf, -np.inf])
    np.testing.assert_array_equal(ulp_error(got, ref), 0.0)


@pytest.mark.parametrize(("got", "ref"), [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (np.nan, np.nan)])
def test_what_is_not_finite_has_no_finite_error(got, ref):
    assert not np.isfinite(ulp_error(np.array([got]), np.array([ref]))[0])


def test_row_ulp_measures_at_the_largest_element_of_the_row():
    ref = np.array([[1.0, 1e-6], [1e-6, 1e-6]])
    got = ref + np.array([[0.0, 2.0**-8], [0.0, 0.0]])
    np.testing.assert_array_equal(row_ulp_error(got, ref), [[0.0, 0.5], [0.0, 0.0]])
