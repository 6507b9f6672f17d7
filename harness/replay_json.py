"""The replay report for machines. `SCHEMA` changes when a field changes its meaning or goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.case_files import Unusable
from harness.comparison import Comparison
from harness.replay import CaseReport
from harness.versions import installed_versions

SCHEMA = "verify-numba/replay/1"


def replay_json(
    reports: Sequence[CaseReport],
    unusable: Sequence[Unusable],
    *,
    device: dict[str, Any],
    settings: dict[str, Any],
    exit_code: int,
) -> dict[str, Any]:
    """The whole run. Errors are absolute, `rel_norm` is a ratio of 2-norms, times are seconds."""
    return {
        "schema": SCHEMA,
        "versions": installed_versions(),
        "device": device,
        "settings": settings,
        "exit_code": exit_code,
        "cases": [case_json(report) for report in reports],
        "unusable": [{"path": u.path, "error": u.error} for u in unusable],
    }


def case_json(report: CaseReport) -> dict[str, Any]:
    """One case: its shape, its verdict and every comparison."""
    return {
        "name": report.name,
        "path": str(report.path),
        "bs": report.bs,
        "N": report.N,
        "T": report.T,
        "H": report.H,
        "prefix_lengths": list(report.prefix_lengths),
        "draft_lengths": list(report.draft_lengths),
        "captured_output": report.has_captured_output,
        "verdict": report.verdict.value,
        "kernels_ok": not report.verdict.kernels_off,
        "captured_ok": not report.verdict.captured_off if report.has_captured_output else None,
        "faults": list(report.faults),
        "kernel_seconds": report.seconds,
        "total_seconds": report.total_seconds,
        "notes": list(report.notes),
        "comparisons": [comparison_json(c) for c in report.comparisons],
    }


def comparison_json(c: Comparison) -> dict[str, Any]:
    """One comparison; a number that is not finite becomes null, and `not_finite` counts such elements."""
    return {
        "subject": c.check.subject.value,
        "reference": c.check.reference.value,
        "part": c.check.part,
        "tensor": c.check.tensor,
        "passed": c.passed,
        "max_abs": c.max_abs,
        "max_bf16_ulp": c.max_ulp,
        "max_bf16_row_ulp": c.max_row_ulp,
        "rel_norm": c.rel_norm,
        "rel_norm_limit": c.rel_norm_limit,
        "budget_use": c.budget_use,
        "elements": c.elements,
        "elements_off": c.elements_off,
        "rows": c.rows,
        "rows_off": c.rows_off,
        "not_finite": c.not_finite,
        "worst": _worst(c),
    }


def _worst(c: Comparison) -> dict[str, Any] | None:
    if c.worst is None:
        return None
    place = {
        "request": c.worst.request,
        "token": c.worst.token,
        "head": c.worst.head,
        "column": c.worst.column,
    }
    return {**place, "got": _word(c.got), "expected": _word(c.expected), "tolerance": c.tolerance}


def _word(value: float) -> float | str:
    """A value that a failure is about must not vanish into null: 'nan', 'inf', '-inf'."""
    return value if math.isfinite(value) else str(value)
