"""How a live defragmentation run is judged and told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from harness.defrag_live_run import TierRun
from sglang_glue.defrag.runs import BUCKETS

Json = dict[str, Any]
MIB = 1 << 20
TIMES = 8
"""Stretches of time that the course of a run is told in."""
SHOWN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)


def faults_of(run: TierRun, verify: bool, tie: float) -> list[str]:
    """Everything that is not as it should be, as sentences."""
    if run.failure is not None:
        return [f"{run.tier}: {run.failure}"]
    found = [f"{run.tier}: {text}" for text in _at_work(run)]
    far = [d for d in run.result.get("differences", []) if d["gap"] is None or d["gap"] > tie]
    if far:
        found.append(f"{run.tier}: {len(far)} answers differ where their tokens do not tie")
    return found + ([f"{run.tier}: {text}" for text in _verify_faults(run.backends)] if verify else [])


def _at_work(run: TierRun) -> list[str]:
    if not run.result["ranks"]:
        return ["no scheduler reported: the plug-in is not live"]
    found = []
    for report in run.result["ranks"]:
        where, counters = f"rank {report['rank']}", report["counters"]
        if report["tier"] != run.tier:
            found.append(f"{where} runs tier {report['tier']}")
        if run.tier != "off" and not report["sorted_allocator"]["allocs"]:
            found.append(f"{where}: the sorted allocator was never asked")
        if run.tier == "relocate" and report["relocation"] != "on":
            found.append(f"{where} does not relocate: {report['relocation']}")
        elif run.tier == "relocate" and not counters["relocations"]:
            found.append(f"{where} never moved anything, in {counters['looks']} looks: this run proves nothing")
    return found


def _verify_faults(backends: Sequence[Json]) -> list[str]:
    if not backends:
        return ["no process reported the verify plug-in: it is not live"]
    found = []
    for backend in backends:
        counters = backend.get("counters")
        if counters is None:
            found.append(f"the verify kernel was not taken: {backend['declined']}")
            continue
        if counters["eager_calls"] + counters["graph_calls"] == 0:
            found.append("no verify call was ours")
        if counters["errors"]:
            found.append(f"errors of the verify kernel: {counters['errors']}")
    return found


def print_runs(runs: Sequence[TierRun], faults: Sequence[str], tie: float, console: Console) -> None:
    """The course of the run lengths, their distribution, what it cost, what it bought, and the verdict."""
    good = [one for one in runs if one.failure is None]
    if good:
        console.print(_course(good))
        console.print(_distribution(good))
        console.print(_cost(good))
        console.print(_bought(good))
    for one in good:
        _print_refusals(one, console)
        _print_answers(one, tie, console)
    for fault in faults:
        console.print(f"FAULT {fault}", highlight=False, soft_wrap=True, markup=False)
    console.print("The tiers agree." if not faults else "The run did NOT pass.")


def late(run: TierRun) -> list[Json]:
    """The reports of the second half of the churn, when the pool has been gone through."""
    churn = run.result["churn_s"]
    return [one["report"] for one in run.live if churn / 2 <= one["seconds"] <= churn]


def _mean(values: Sequence[float]) -> str:
    return f"{float(np.mean(values)):.1f}" if values else "-"


def _course(runs: Sequence[TierRun]) -> Table:
    table = Table("share of the churn", *(r.tier for r in runs), title="Mean run (typical run), in tokens, over time")
    for part in range(TIMES):
        cells = []
        for run in runs:
            begin, end = (run.result["churn_s"] * (part + i) / TIMES for i in (0, 1))
            stats = [one["report"]["live_runs"] for one in run.live if begin <= one["seconds"] < end]
            cells.append(f"{_mean([s['mean'] for s in stats])} ({_mean([s['typical'] for s in stats])})")
        table.add_row(f"{part}/{TIMES} to {part + 1}/{TIMES}", *cells)
    return table


def _distribution(runs: Sequence[TierRun]) -> Table:
    title = "Runs by length, second half of the churn, per cent"
    table = Table("at least", *(r.tier for r in runs), title=title)
    counts = [np.sum([r["live_runs"]["histogram"] for r in late(run)] or [[0] * len(BUCKETS)], axis=0) for run in runs]
    edges = [*SHOWN_BUCKETS, 1 << 62]
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        inside = [i for i, bound in enumerate(BUCKETS) if low <= bound < high]
        shares = [100 * count[inside].sum() / max(count.sum(), 1) for count in counts]
        table.add_row(str(low), *(f"{share:.1f}" for share in shares))
    return table


def _cost(runs: Sequence[TierRun]) -> Table:
    names = (
        "tier",
        "looks",
        "times moved",
        "rows",
        "MiB moved",
        "longest ms",
        "paused ms",
        "of the churn",
        "idle turns",
        "refused",
    )
    table = Table(*names, title="What the churn cost (first rank)", box=None, padding=(0, 1, 0, 0))
    for run in runs:
        report = run.churned
        if report is None:
            continue
        c = report["counters"]
        share = 100 * c["paused_ms"] / (1e3 * run.result["churn_s"])
        numbers = (c["looks"], c["relocations"], c["rows_moved"], f"{c['bytes_moved'] / MIB:.1f}")
        times = (f"{c['longest_pause_ms']:.1f}", f"{c['paused_ms']:.0f}", f"{share:.1f}%")
        table.add_row(run.tier, *map(str, numbers), *times, str(c["drains"]), str(sum(c["refused"].values())))
    return table


def _bought(runs: Sequence[TierRun]) -> Table:
    lengths = [t["length"] for t in runs[0].result["timings"]]
    table = Table(
        "tier",
        "mean run",
        "typical run",
        "free run",
        "churn s",
        "verify steps",
        *(f"ms a step at {n}" for n in lengths),
        title="What it bought (run lengths of the second half of the churn)",
    )
    for run in runs:
        reports = late(run)
        runs_of = [_mean([r[which][what] for r in reports]) for which, what in
                   (("live_runs", "mean"), ("live_runs", "typical"), ("free_runs", "mean"))]  # fmt: skip
        steps = sum(one["steps"] for one in run.result["answers"])
        ms = [t["ms_per_step"] for t in run.result["timings"]]
        table.add_row(
            run.tier,
            *runs_of,
            f"{run.result['churn_s']:.1f}",
            str(steps),
            *("-" if one is None else f"{one:.3f}" for one in ms),
        )
    return table


def _print_refusals(run: TierRun, console: Console) -> None:
    for report in run.result["ranks"]:
        for reason, count in report["counters"]["refused"].items():
            text = f"{run.tier}, rank {report['rank']}: refused {count} times: {reason}"
            console.print(text, highlight=False, soft_wrap=True, markup=False)


def _print_answers(run: TierRun, tie: float, console: Console) -> None:
    if "differences" not in run.result:
        return
    different = run.result["differences"]
    whole = sum(one["tokens"] is not None for one in run.result["answers"])
    text = f"{run.tier}: {whole - len(different)} of {whole} answers have the same tokens"
    console.print(text, highlight=False)
    for one in different:
        gap = "not among the likeliest tokens" if one["gap"] is None else f"log-probability gap {one['gap']:.4f}"
        near = one["gap"] is not None and one["gap"] <= tie
        first, second = one["tokens"]
        where = f"  request {one['request']}, token {one['position']}: {first} or {second}"
        console.print(f"{where}, {gap}: {'near tie' if near else 'NOT a tie'}", highlight=False)
