"""Errors planted in the kernels or in the captured output: each is blamed on the right side, at its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from captured_tensors import CaptureMeta
from harness.comparison import Coordinate, Subject
from harness.devices import HostDevice
from harness.errors import UsageError
from harness.replay import Options, Verdict, replay
from tests.harness.fakes import FakeVerifier, small_case
from verify_numba import Parts
from verify_numba.dims import D_QK

H, D_V = 8, 512


def report_of(fake, case=None, **options):
    case = small_case() if case is None else case
    return replay(case, Path("case"), lambda _: fake, HostDevice(), Options(**options))


def by_check(report):
    checks = {}
    for c in report.comparisons:
        checks[c.check.subject, c.check.reference, c.check.part, c.check.tensor] = c
    return checks


def failed_parts(report, tensor):
    return {c.check.part for c in report.failures if c.check.tensor == tensor}


def test_right_kernels_pass_everything():
    fake = FakeVerifier()
    report = report_of(fake, permute_seed=1)
    assert report.verdict is Verdict.PASS
    assert not report.failures
    oracle = {
        (c.check.part, c.check.tensor) for c in report.comparisons if c.check.subject is Subject.KERNELS
    }
    assert oracle == {(p, t) for p in ("prefix", "tail", "whole") for t in ("out", "lse")}
    assert {c.check.subject for c in report.comparisons} == {
        Subject.KERNELS,
        Subject.CAPTURED,
        Subject.PERMUTED,
    }


def test_outputs_and_workspace_are_poisoned_before_every_run():
    fake = FakeVerifier()
    report_of(fake, permute_seed=1)
    assert fake.poisoned == 4
    assert fake.found_poison


def test_pool_slots_of_nobody_are_nan():
    seen = []
    fake = FakeVerifier(plant=lambda batch, out, lse: seen.append(batch))
    report_of(fake)
    batch = seen[0]
    case = small_case()
    owned = np.isfinite(batch.kv_pool.astype(np.float32)).all((1, 2))
    assert owned.sum() == len(np.unique(np.concatenate([case.kv_indices[:87], case.out_cache_loc])))
    assert np.isnan(batch.kv_pool[~owned].astype(np.float32)).all()
    assert not owned.all()


def test_an_lse_in_base_two_is_found():
    def base_two(batch, out, lse):
        lse /= np.log(2)

    report = report_of(FakeVerifier(plant=base_two))
    assert report.verdict is Verdict.KERNELS_OFF
    assert failed_parts(report, "lse") == {"prefix", "tail", "whole"}
    assert failed_parts(report, "out") == set()


@pytest.mark.parametrize("part", [Parts.PREFIX, Parts.TAIL, Parts.ALL])
def test_an_error_in_one_part_is_blamed_on_that_part(part):
    def shift(batch, out, lse):
        out[12, 5, 300] = out[12, 5, 300].astype(np.float32) + 0.5

    report = report_of(FakeVerifier(plant=shift, only=part))
    name = {Parts.PREFIX: "prefix", Parts.TAIL: "tail", Parts.ALL: "whole"}[part]
    assert report.verdict is Verdict.KERNELS_OFF
    assert failed_parts(report, "out") == {name}
    for failure in report.failures:
        assert failure.worst == Coordinate(request=1, token=3, head=5, column=300)
        assert (failure.elements_off, failure.rows_off) == (1, 1)


def test_one_nan_is_found():
    def nan(batch, out, lse):
        out[8, 7, 511] = np.nan

    report = report_of(FakeVerifier(plant=nan, only=Parts.ALL))
    assert report.verdict is Verdict.KERNELS_OFF
    worst = by_check(report)[Subject.KERNELS, Subject.ORACLE, "whole", "out"]
    assert (worst.worst, worst.not_finite) == (Coordinate(0, 8, 7, 511), 1)


def test_a_row_that_was_never_written_is_found():
    def forget(batch, out, lse):
        out[3], lse[3] = np.nan, np.nan

    report = report_of(FakeVerifier(plant=forget, only=Parts.PREFIX))
    assert failed_parts(report, "out") == failed_parts(report, "lse") == {"prefix"}
    assert {f.worst.token for f in report.failures} == {3}
    assert {f.rows_off for f in report.failures} == {H}


def test_a_dropped_prefix_key_is_found():
    def drop_last(batch):
        indptr = np.array([0, 24, 86], batch.kv_indptr.dtype)  # request 1 loses its last of 63 keys
        mask = np.delete(batch.custom_mask, 9 * 33 + 72 * np.arange(9) + 62)
        return replace(batch, kv_indptr=indptr, custom_mask=mask)

    report = report_of(FakeVerifier(alter=drop_last))
    assert report.verdict is Verdict.KERNELS_OFF
    assert "prefix" in failed_parts(report, "lse")
    assert "tail" not in failed_parts(report, "lse") | failed_parts(report, "out")
    assert {f.worst.request for f in report.failures} == {1}


def test_a_mask_cell_too_many_is_found():
    def all_see_all(batch):
        return replace(batch, custom_mask=np.ones_like(batch.custom_mask))

    report = report_of(FakeVerifier(alter=all_see_all))
    assert failed_parts(report, "lse") == {"tail", "whole"}


def test_output_that_depends_on_the_slots_is_no_permutation():
    def depends(batch, out, lse):
        out[0, 0, 0] += bfloat16(2.0**-6 * (int(batch.kv_indices[0]) % 1000))

    report = report_of(FakeVerifier(plant=depends, only=Parts.ALL), permute_seed=5)
    check = by_check(report)[Subject.PERMUTED, Subject.KERNELS, "whole", "out"]
    assert not check.passed
    assert check.worst == Coordinate(0, 0, 0, 0)
    assert report.verdict is Verdict.KERNELS_OFF


def test_permuting_moves_every_row():
    seen = []
    report_of(
        FakeVerifier(plant=lambda batch, out, lse: seen.append(batch.kv_indices), only=Parts.ALL),
        permute_seed=9,
    )
    plain, moved = seen
    assert (plain[:87] != moved[:87]).all()


def captured_with(change):
    case = small_case()
    out = case.out_triton.reshape(case.N, H, D_V).copy()
    change(out)
    return small_case(out_triton=out.reshape(case.N, H * D_V))


def test_a_captured_output_that_is_off_is_not_blamed_on_the_kernels():
    def spoil(out):
        out[10, 2, 40] = 77.0

    report = report_of(FakeVerifier(), captured_with(spoil))
    assert report.verdict is Verdict.CAPTURED_OFF
    checks = by_check(report)
    place = Coordinate(request=1, token=1, head=2, column=40)
    assert checks[Subject.CAPTURED, Subject.ORACLE, "whole", "out"].worst == place
    assert checks[Subject.KERNELS, Subject.CAPTURED, "whole", "out"].worst == place
    assert checks[Subject.KERNELS, Subject.ORACLE, "whole", "out"].passed


def test_both_can_be_off_even_if_they_agree():
    def spoil(out):
        out[10, 2, 40] = 77.0

    report = report_of(
        FakeVerifier(plant=lambda batch, out, lse: spoil(out), only=Parts.ALL), captured_with(spoil)
    )
    assert report.verdict is Verdict.BOTH_OFF
    assert by_check(report)[Subject.KERNELS, Subject.CAPTURED, "whole", "out"].passed


def test_a_case_without_captured_output_says_so():
    report = report_of(FakeVerifier(), small_case(out_triton=None))
    assert report.verdict is Verdict.PASS
    assert not report.has_captured_output
    assert any("no captured output" in note for note in report.notes)
    assert Subject.CAPTURED not in {c.check.subject for c in report.comparisons}


def test_a_fault_in_one_part_is_the_kernels_and_the_rest_is_judged():
    def crash(batch, out, lse):
        raise RuntimeError("warp 3 of block (0, 0): a deadlock")

    report = report_of(FakeVerifier(plant=crash, only=Parts.ALL), permute_seed=1)
    assert report.verdict is Verdict.KERNELS_OFF
    assert report.faults == ("kernels whole: RuntimeError: warp 3 of block (0, 0): a deadlock",)
    assert {c.check.part for c in report.comparisons if c.check.subject is Subject.KERNELS} == {
        "prefix",
        "tail",
    }
    assert [c.passed for c in report.comparisons if c.check.subject is Subject.CAPTURED] == [True]


def test_a_parent_after_its_child_is_noted():
    case = small_case()
    mask = case.custom_mask.copy()
    mask[24 + 1] = True  # request 0, token 0 sees token 1
    report = report_of(FakeVerifier(), replace(case, custom_mask=mask, out_triton=None))
    assert any("request 0" in note and "larger index" in note for note in report.notes)


def test_a_step_without_a_finite_answer_is_refused():
    case = small_case()
    q = case.q.copy()
    q[11, 4, 0] = np.nan
    with pytest.raises(UsageError, match="1 of 144 rows, first at request 1, token 2, head 4"):
        report_of(FakeVerifier(), replace(case, q=q))


def test_an_empty_batch_passes():
    case = small_case()
    empty = {
        "q": np.zeros((0, H, D_QK), bfloat16),
        "k": np.zeros((0, 1, D_QK), bfloat16),
        "v": np.zeros((0, 1, D_V), bfloat16),
        "qo_indptr": np.zeros(1, np.int32),
        "kv_indptr": np.zeros(1, np.int32),
        "kv_indices": np.zeros(0, np.int64),
        "custom_mask": np.zeros(0, np.bool_),
        "mask_indptr": np.zeros(1, np.int64),
        "out_cache_loc": np.zeros(0, np.int64),
        "seq_lens": np.zeros(0, np.int64),
        "req_pool_indices": np.zeros(0, np.int64),
        "positions": np.zeros(0, np.int64),
        "prefix_rows": np.zeros((0, 1, D_QK), bfloat16),
        "tail_rows": np.zeros((0, 1, D_QK), bfloat16),
        "out_triton": np.zeros((0, H * D_V), bfloat16),
    }
    assert isinstance(case.meta, CaptureMeta)
    assert report_of(FakeVerifier(), replace(case, **empty), permute_seed=0).verdict is Verdict.PASS
