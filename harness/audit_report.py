"""The audit's table and its JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.audit_measure import Finding
from harness.audit_scan import COUNTED
from harness.versions import installed_versions
from verify_numba.gpu.cache_key import toolchain_versions

_NUMBERS = ("regs", "spill B", "local B", "static + dynamic B", "blocks/SM", "instr.")
_COUNTS = tuple(name for name in COUNTED if name != "local")
PLAIN_WIDTH = 160
"""Columns of the table where there is no terminal to ask."""


def print_report(findings: list[Finding], lacking: list[str], console: Console) -> None:
    """One line a variant and architecture; what is wrong, in words, below."""
    table = Table(title="Kernel audit", title_justify="left")
    table.add_column("variant", no_wrap=True)
    table.add_column("arch", no_wrap=True)
    for name in (*_NUMBERS, *_COUNTS):
        table.add_column(name, justify="right")
    table.add_column("verdict", no_wrap=True)
    for finding in findings:
        table.add_row(*_cells(finding), style="red" if finding.problems else None)
    console.print(table)
    for line in (*_problems(findings), *lacking):
        console.print(line, style="red", markup=False)
    failed = sum(bool(finding.problems) for finding in findings)
    absent = f", {len(lacking)} missing" if lacking else ""
    console.print(f"{len(findings) - failed} of {len(findings)} pass{absent}")


def _problems(findings: list[Finding]) -> list[str]:
    """One entry a variant and problem, with all the architectures that have it."""
    where: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        for problem in finding.problems:
            general = problem.replace(_arch(finding), "this architecture")
            where.setdefault((finding.variant, general), []).append(_arch(finding))
    return [f"{variant} on {', '.join(arches)}: {problem}" for (variant, problem), arches in where.items()]


def _cells(finding: Finding) -> list[str]:
    counts = finding.counts
    if not counts:
        return [finding.variant, _arch(finding), *["-"] * (len(_NUMBERS) + len(_COUNTS)), "FAIL"]
    return [
        finding.variant,
        _arch(finding),
        str(finding.registers),
        str(finding.spill_stores + finding.spill_loads),
        str(finding.local),
        f"{finding.static_smem:,} + {finding.dynamic_smem:,}",
        str(finding.blocks_per_sm),
        str(counts["all"]),
        *(str(counts[name]) for name in _COUNTS),
        "FAIL" if finding.problems else "pass",
    ]


def _arch(finding: Finding) -> str:
    return f"sm_{finding.cc[0]}{finding.cc[1]}"


def as_json(findings: list[Finding], lacking: list[str]) -> dict[str, Any]:
    """Everything measured, for machines; `passed` is the verdict over all."""
    return {
        "passed": not lacking and not any(finding.problems for finding in findings),
        "missing": lacking,
        "variants": [
            asdict(finding) | {"cc": f"{finding.cc[0]}.{finding.cc[1]}", "passed": not finding.problems}
            for finding in findings
        ],
        "versions": installed_versions(),
        "toolchain": toolchain_versions(),
    }
