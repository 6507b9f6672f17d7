"""Holds the results of a replayed step to the float64 oracle and to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from captured_tensors import CaptureCase
from harness.compare import Tolerance, compare, compare_bits, coordinate
from harness.comparison import Check, Comparison, Subject
from harness.errors import UsageError
from harness.kernels import Result
from oracle import ErrorBudget, error_budget, verify_batch
from verify_numba import Parts, VerifyBatch
from verify_numba.dims import D_V

PART_NAMES = {Parts.PREFIX: "prefix", Parts.TAIL: "tail", Parts.ALL: "whole"}


@dataclass(frozen=True)
class Answer:
    """What the oracle gives for one part, and how far a result may be from it."""

    part: str
    out: NDArray[np.float64]
    lse: NDArray[np.float64]
    budget: ErrorBudget
    qo_indptr: NDArray[np.integer]

    @property
    def out_tolerance(self) -> Tolerance:
        return Tolerance(self.budget.out_abs, self.budget.out_norm, self.budget.out_rel)


def answer(batch: VerifyBatch, parts: Parts) -> Answer:
    """The oracle's answer for a batch of NumPy arrays.

    Raises UsageError where it is not a number: then no kernel can be held to it.
    """
    out, lse = verify_batch(batch, parts)
    broken = ~(np.isfinite(out).all(-1) & (np.isfinite(lse) | (lse == -np.inf)))
    if broken.any():
        row, head = (int(i) for i in np.argwhere(broken)[0])
        first = coordinate((row, head), batch.qo_indptr)
        raise UsageError(
            f"the float64 answer is not finite in {int(broken.sum()):,} of {broken.size:,} rows, first at "
            f"{first.describe()}: q or a key that it sees holds NaN or infinity"
        )
    return Answer(PART_NAMES[parts], out, lse, error_budget(batch, parts), batch.qo_indptr)


def judge_kernels(result: Result, right: Answer) -> tuple[Comparison, ...]:
    """out and lse of the kernels against the oracle."""
    out = Check(Subject.KERNELS, Subject.ORACLE, right.part, "out")
    lse = Check(Subject.KERNELS, Subject.ORACLE, right.part, "lse")
    at = right.qo_indptr
    return (
        compare(out, result.out, right.out, right.out_tolerance, qo_indptr=at),
        compare(lse, result.lse, right.lse, Tolerance(right.budget.lse_abs), qo_indptr=at),
    )


def judge_captured(case: CaptureCase, result: Result | None, right: Answer) -> tuple[Comparison, ...]:
    """The recorded output against the oracle, and the kernels against it; nothing where none was recorded.

    Two results within their budgets of the same answer are within twice the budget of each other. No LSE is
    recorded in a capture. `result` is None where the kernels failed to give one.
    """
    if case.out_triton is None:
        return ()
    captured = case.out_triton.reshape(case.N, case.H, D_V)
    at = right.qo_indptr
    own = Check(Subject.CAPTURED, Subject.ORACLE, right.part, "out")
    judged = compare(own, captured, right.out, right.out_tolerance, qo_indptr=at)
    if result is None:
        return (judged,)
    mutual = Check(Subject.KERNELS, Subject.CAPTURED, right.part, "out")
    both = right.out_tolerance + right.out_tolerance
    return judged, compare(mutual, result.out, captured, both, qo_indptr=at)


def judge_permuted(permuted: Result, result: Result, right: Answer) -> tuple[Comparison, ...]:
    """The kernels with every row at another slot against the kernels: bit for bit."""
    pairs = (("out", permuted.out, result.out), ("lse", permuted.lse, result.lse))
    return tuple(
        compare_bits(
            Check(Subject.PERMUTED, Subject.KERNELS, right.part, name), got, ref, qo_indptr=right.qo_indptr
        )
        for name, got, ref in pairs
    )
