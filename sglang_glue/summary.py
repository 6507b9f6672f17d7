"""One line a rank on what the plug-in did, from the counter files of this run (the ranks may be dead by then)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_glue.status import RUN_VARIABLE, read_statuses

Json = dict[str, Any]


def summary_lines(folder: Path) -> Iterator[str]:
    """The lines to print when a server ends."""
    run = os.environ.get(RUN_VARIABLE)
    for status in read_statuses(folder):
        if status.run == run:
            yield from (f"verify-numba: {describe(backend)}" for backend in status.content.get("backends", []))


def describe(backend: Json) -> str:
    """One backend as one line."""
    head = f"{backend['rank']} {backend['mode']}"
    if "counters" not in backend:
        return f"{head}: not installed ({backend['declined']}); Triton serves everything"
    counters = backend["counters"]
    parts = [
        f"{counters['eager_calls']} eager and {counters['graph_calls']} graph calls ours",
        f"declined {_listed(counters['declines'])}",
        f"errors {_pairs(counters['errors'])}",
    ]
    if counters["validate"]:
        parts += [_validated(tag, counters["validate"][tag]) for tag in ("eager", "graph")]
    elif backend["mode"] == "validate":
        parts.append("nothing compared yet")
    fallback = backend.get("ranks", {}).get("fallback")
    if fallback:
        parts.insert(0, f"RANKS FELL BACK ({fallback})")
    if backend.get("capture"):
        parts.append(f"captured {_pairs(backend['capture'])}")
    return f"{head}: " + "; ".join([*parts, backend["plan"]])


def _listed(declines: Json) -> str:
    return ", ".join(f"{tag} {_pairs(declines[tag])}" for tag in declines if declines[tag]) or "none"


def _pairs(counts: Json) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _validated(tag: str, found: Json) -> str:
    if not found["calls"]:
        return f"{tag}: nothing compared"
    return (
        f"{tag}: {found['calls']} calls compared, {found['mismatches']} mismatches,"
        f" relative norm {found['relative_norm']:.2e}, max abs {found['max_abs']:.2e}"
        f" (worst: layer {found['worst_layer']}, prefix {found['worst_prefix']}, bs {found['worst_bs']}),"
        f" non-finite rows {found['nan_ours']} ours, {found['nan_triton']} Triton"
    )
