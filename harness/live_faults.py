"""What is not as it should be in one run of a live comparison, as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.live_run import ModeRun
from harness.live_spec import LiveSpec

Json = dict[str, Any]


def faults_of(run: ModeRun, spec: LiveSpec) -> Iterator[str]:
    """Faults of the plug-in's reports, of the ranks' agreement and of the repetitions."""
    if run.mode == "off":
        if run.backends:
            yield "the plug-in left a counter file"
    elif not run.backends:
        yield "no process reported the plug-in: it is not live"
    else:
        yield from _of_backends(run.backends, spec)
    yield from _of_accepted(run.accepted, spec)
    repeats = run.result.get("repeats", {"distinct": 1})
    if repeats["distinct"] != 1:
        yield f"{repeats['runs']} repetitions of one batch gave {repeats['distinct']} different answers"


def _of_backends(backends: list[Json], spec: LiveSpec) -> Iterator[str]:
    by_rank = sorted(backends, key=lambda backend: str(backend["rank"]))
    for backend in by_rank:
        yield from (f"{backend['rank']}: {fault}" for fault in _of_backend(backend))
    missing = set(_ranks(spec)) - {backend["rank"] for backend in backends}
    if missing:
        yield f"no report of {', '.join(sorted(missing))}"
    served = {(c["eager_calls"], c["graph_calls"]) for b in by_rank if (c := b.get("counters"))}
    if len(served) > 1:
        yield f"the ranks served different numbers of calls (eager, graph): {sorted(served)}"


def _of_backend(backend: Json) -> Iterator[str]:
    if "counters" not in backend:
        yield f"backend not taken ({backend['declined']})"
        return
    counters = backend["counters"]
    if counters["eager_calls"] + counters["graph_calls"] == 0:
        yield "no verify call was ours"
    yield from (f"declined {reasons} ({tag})" for tag, reasons in counters["declines"].items() if reasons)
    if counters["errors"]:
        yield f"errors {counters['errors']}"
    for tag in ("eager", "graph"):
        found = (counters["validate"] or {}).get(tag, {"mismatches": 0, "nan_ours": 0})
        if found["mismatches"] or found["nan_ours"]:
            yield f"{found['mismatches']} mismatches, {found['nan_ours']} rows not finite ({tag})"


def _of_accepted(accepted: dict[str, Json], spec: LiveSpec) -> Iterator[str]:
    """Every rank decides for itself what is accepted; all must have decided the same, at every step."""
    missing = set(_ranks(spec)) - set(accepted)
    if spec.tp > 1 and missing:
        yield f"{', '.join(sorted(missing))} did not say which tokens were accepted"
    if len({(a["steps"], a["hash"]) for a in accepted.values()}) > 1:
        yield f"the ranks accepted different tokens: {accepted}"


def _ranks(spec: LiveSpec) -> list[str]:
    return [f"tp{rank}" for rank in range(spec.tp)]
