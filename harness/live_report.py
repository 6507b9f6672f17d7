"""The outcome of a live comparison: one object, its JSON and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.live_compare import Divergence, Explained, answers, divergences, explain
from harness.live_faults import faults_of
from harness.live_run import LiveRunner, ModeRun
from harness.live_spec import LiveSpec
from sglang_glue.summary import describe

Json = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """All runs, and for each but the first how its tokens differ from the first's."""

    spec: LiveSpec
    runs: list[ModeRun]
    differing: dict[str, list[Explained]]
    tie: float
    failures: tuple[str, ...] = ()  # what is to be said of runs that did not finish

    @classmethod
    def of(
        cls, spec: LiveSpec, runs: list[ModeRun], runner: LiveRunner, tie: float, failures: Sequence[str] = ()
    ) -> Comparison:
        """Compare, asking a plain engine about the tokens that differ, if any do."""
        found = {run.label: divergences(spec, runs[0], run) for run in runs[1:]}
        everything = [at for one in found.values() for at in one]
        explained = explain(everything, _logprobs(spec, everything, runner))
        differing: dict[str, list[Explained]] = {}
        for label, one in found.items():
            differing[label], explained = explained[: len(one)], explained[len(one) :]
        return cls(spec, runs, differing, tie, tuple(failures))

    @property
    def faults(self) -> list[str]:
        """Everything that is not as it should be, as sentences."""
        found = [failure.splitlines()[0] for failure in self.failures]
        found += [f"{run.label}: {fault}" for run in self.runs for fault in faults_of(run, self.spec)]
        for label, one in self.differing.items():
            far = [e for e in one if not e.is_near_tie(self.tie)]
            if far:
                found.append(f"{label}: {len(far)} answers differ where the tokens do not tie")
        return found

    @property
    def agrees(self) -> bool:
        return not self.faults

    def as_json(self) -> Json:
        return {
            "agrees": self.agrees,
            "faults": self.faults,
            "spec": asdict(self.spec),
            "runs": [self._run_json(run) for run in self.runs],
        }

    def _run_json(self, run: ModeRun) -> Json:
        return {
            "label": run.label,
            "mode": run.mode,
            "sglang": run.result["sglang"],
            "answers": answers(run),
            "differing": [e.as_json() for e in self.differing.get(run.label, [])],
            "timings": [_without_tokens(t) for t in run.result["timings"]],
            "repeats": _without_tokens(run.result.get("repeats", {})),
            "accepted": run.accepted,
            "backends": run.backends,
        }


def _without_tokens(found: Json) -> Json:
    return {name: value for name, value in found.items() if name != "tokens"}


def _logprobs(spec: LiveSpec, found: list[Divergence], runner: LiveRunner) -> list[dict[str, float]]:
    if not found:
        return []
    return runner.next_logprobs(replace(spec, algorithm="none"), [at.prompt for at in found])


def print_comparison(comparison: Comparison) -> None:
    """What differed, then the verdict."""
    console = Console()
    for run in comparison.runs:
        for backend in run.backends:
            console.print(f"{run.label}: {describe(backend)}", highlight=False, soft_wrap=True)
        for line in _rank_lines(run):
            console.print(f"{run.label}: {line}", highlight=False, soft_wrap=True)
    _print_tokens(console, comparison)
    if comparison.spec.lengths:
        console.print(_timings(comparison))
    for fault in comparison.faults:
        console.print(f"FAULT {fault}", highlight=False, soft_wrap=True)
    console.print("The runs agree." if comparison.agrees else "The runs do NOT agree.")


def _rank_lines(run: ModeRun) -> Iterator[str]:
    if len(run.accepted) > 1:
        ranks = ", ".join(f"{rank} {a['hash']} ({a['steps']} steps)" for rank, a in run.accepted.items())
        yield f"accepted tokens by rank: {ranks}"
    if "repeats" in run.result:
        repeats = run.result["repeats"]
        yield f"{repeats['runs']} repetitions of one batch, {repeats['distinct']} distinct outcomes"


def _print_tokens(console: Console, comparison: Comparison) -> None:
    base = comparison.runs[0].label
    for label, differing in comparison.differing.items():
        total = answers(comparison.runs[0])
        console.print(
            f"{label}: {total - len(differing)} of {total} answers have the tokens of {base}", highlight=False
        )
        for one in differing:
            at = one.divergence
            gap = "not among the likeliest tokens" if one.gap is None else f"log-probability gap {one.gap:.4f}"
            verdict = "near tie" if one.is_near_tie(comparison.tie) else "NOT a tie"
            console.print(
                f"  {at.where}, token {at.position}: {at.token} or {at.other}, {gap}: {verdict}",
                highlight=False,
            )


def _timings(comparison: Comparison) -> Table:
    table = Table("prefix", *(f"{run.label} ms/step" for run in comparison.runs), box=None)
    base = comparison.runs[0]
    for row, length in enumerate(comparison.spec.lengths):
        first = base.result["timings"][row]["ms_per_step"]
        cells = []
        for run in comparison.runs:
            ms = run.result["timings"][row]["ms_per_step"]
            ratio = f" ({first / ms:.1f}x)" if run is not base and ms and first else ""
            cells.append("no verify step" if ms is None else f"{ms:.2f}{ratio}")
        table.add_row(str(length), *cells)
    return table
