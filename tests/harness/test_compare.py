import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from ml_dtypes import bfloat16

from harness.compare import Tolerance, compare, compare_bits
from harness.comparison import Check, Coordinate, Subject

OUT = Check(Subject.KERNELS, Subject.ORACLE, "whole", "out")
LSE = Check(Subject.KERNELS, Subject.ORACLE, "whole", "lse")
QO_INDPTR = np.array([0, 3, 3, 8])
"""Three requests, the second without draft tokens."""
N, H, D = 8, 4, 16


@pytest.fixture
def ref():
    return np.random.default_rng(1).standard_normal((N, H, D))


def planted(ref, index, value):
    got = ref.copy()
    got[index] = value
    return got


def test_equal_passes_and_uses_nothing(ref):
    c = compare(OUT, ref, ref, Tolerance(0.0, 0.0, 0.0), qo_indptr=QO_INDPTR)
    assert c.passed
    assert (c.max_abs, c.max_ulp, c.max_row_ulp, c.rel_norm, c.budget_use) == (0, 0, 0, 0, 0)


def test_one_element_off_is_found_at_its_coordinate(ref):
    got = planted(ref, (4, 2, 7), ref[4, 2, 7] + 0.5)
    c = compare(OUT, got, ref, Tolerance(0.1), qo_indptr=QO_INDPTR)
    assert not c.passed
    assert c.worst == Coordinate(request=2, token=1, head=2, column=7)
    assert (c.elements_off, c.rows_off, c.elements, c.rows) == (1, 1, N * H * D, N * H)
    assert c.max_abs == pytest.approx(0.5)
    assert c.budget_use == pytest.approx(5.0)
    text = c.describe()
    assert "1 of 512 elements" in text
    assert "request 2, token 1, head 2, column 7" in text


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_never_passes(ref, bad):
    c = compare(OUT, planted(ref, (0, 0, 0), bad), ref, Tolerance(math.inf), qo_indptr=QO_INDPTR)
    assert c.not_finite == 1
    assert c.worst == Coordinate(0, 0, 0, 0)
    assert not c.passed


def test_nan_on_both_sides_does_not_pass(ref):
    both = planted(ref, (1, 1, 1), math.nan)
    assert not compare(OUT, both, both, Tolerance(math.inf), qo_indptr=QO_INDPTR).passed
    assert not compare_bits(OUT, both, both, qo_indptr=QO_INDPTR).passed


def test_nan_is_the_worst_even_beside_a_larger_number(ref):
    got = planted(planted(ref, (0, 0, 0), 1e30), (7, 3, 15), math.nan)
    c = compare(OUT, got, ref, Tolerance(0.1), qo_indptr=QO_INDPTR)
    assert c.worst == Coordinate(2, 4, 3, 15)


def test_the_lse_of_an_empty_row_agrees_with_minus_infinity_alone():
    ref = np.full((N, H), -np.inf)
    assert compare(LSE, ref, ref, Tolerance(0.0), qo_indptr=QO_INDPTR).passed
    c = compare(LSE, planted(ref, (5, 1), -1e30), ref, Tolerance(1.0), qo_indptr=QO_INDPTR)
    assert not c.passed
    assert c.worst == Coordinate(2, 2, 1)
    assert c.max_ulp is None


def test_tolerance_can_differ_by_row(ref):
    allowed = np.full((N, H), 1e-9)
    allowed[3, 1] = 1.0
    assert compare(
        OUT, planted(ref, (3, 1, 2), ref[3, 1, 2] + 0.9), ref, Tolerance(allowed), qo_indptr=QO_INDPTR
    ).passed
    assert not compare(
        OUT, planted(ref, (3, 2, 2), ref[3, 2, 2] + 0.9), ref, Tolerance(allowed), qo_indptr=QO_INDPTR
    ).passed


def test_a_row_can_be_off_where_no_element_is(ref):
    got = ref.copy()
    got[2, 3] += 0.1
    c = compare(OUT, got, ref, Tolerance(0.2, row=0.3), qo_indptr=QO_INDPTR)
    assert (c.elements_off, c.rows_off, c.passed) == (0, 1, False)
    assert "1 of 32 rows" in c.describe()
    assert c.budget_use == pytest.approx(0.1 * math.sqrt(D) / 0.3)


def test_the_whole_can_be_off_where_no_row_is(ref):
    c = compare(OUT, ref * 1.01, ref, Tolerance(1.0, 1.0, rel_norm=0.005), qo_indptr=QO_INDPTR)
    assert (c.elements_off, c.rows_off, c.passed) == (0, 0, False)
    assert c.rel_norm == pytest.approx(0.01)
    assert "relative norm 0.01" in c.describe()


def test_bits_tell_minus_zero_from_zero():
    a = np.zeros((1, 1, 4), bfloat16)
    b = a.copy()
    b[0, 0, 2] = -0.0
    c = compare_bits(OUT, b, a, qo_indptr=np.array([0, 1]))
    assert (c.passed, c.elements_off, c.worst) == (False, 1, Coordinate(0, 0, 0, 2))
    assert "bit for bit" in c.describe()


def test_bits_find_the_last_bit():
    a = np.ones((2, 1, 4), np.float32)
    b = a.copy()
    b[1, 0, 3] = np.nextafter(np.float32(1), np.float32(2))
    assert compare_bits(OUT, a, a, qo_indptr=np.array([0, 2])).passed
    assert compare_bits(OUT, b, a, qo_indptr=np.array([0, 2])).worst == Coordinate(0, 1, 0, 3)


def test_an_empty_batch_passes():
    none = np.zeros((0, H, D))
    c = compare(OUT, none, none, Tolerance(np.zeros((0, H)), np.zeros((0, H)), 0.0), qo_indptr=np.array([0]))
    assert c.passed
    assert (c.worst, c.rows, c.elements) == (None, 0, 0)


def test_shapes_and_dtypes_must_agree(ref):
    with pytest.raises(ValueError, match=r"shape \(8, 4, 15\), expected \(8, 4, 16\)"):
        compare(OUT, ref[..., 1:], ref, Tolerance(1.0), qo_indptr=QO_INDPTR)
    with pytest.raises(ValueError, match="float32.*expected float64"):
        compare_bits(OUT, ref.astype(np.float32), ref, qo_indptr=QO_INDPTR)


def test_a_comparison_is_frozen(ref):
    c = compare(OUT, ref, ref, Tolerance(1.0), qo_indptr=QO_INDPTR)
    with pytest.raises(FrozenInstanceError):
        c.max_abs = 0.0


def test_tolerances_add_up():
    both = Tolerance(1.0, 2.0, 0.5) + Tolerance(1.0, 2.0, 0.5)
    assert (both.element, both.row, both.rel_norm) == (2.0, 4.0, 1.0)
