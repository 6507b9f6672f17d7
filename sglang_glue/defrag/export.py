"""What a rank's defragmentation says about itself: a file beside the counter files, and SGLang's Prometheus metrics.

``<status folder>/defrag-<pid>.json`` is rewritten whole after each look and each relocation: the proof, by call
counters, that the sorted allocator is the one in use in this rank.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from sglang_glue.settings import default_status_folder

log = logging.getLogger(__name__)

Json = dict[str, Any]
PREFIX = "verify_numba:defrag_"


class Exporter:
    """Publishes reports of one rank. A failure to do so is logged once and never raised."""

    def __init__(self, rank: str, folder: Path | None = None) -> None:
        self.rank = rank
        self._path = (folder or status_folder()) / f"defrag-{os.getpid()}.json"
        self._gauges: Json | None = None
        self._failed = False

    def publish(self, report: Json) -> None:
        """Write the file and set the metrics."""
        try:
            self._write({"rank": self.rank, **report})
            if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
                self._set(report)
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("verify-numba: defragmentation cannot be reported (logged once)")

    def _write(self, report: Json) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_the_dead(self._path.parent)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1))
        os.replace(partial, self._path)

    def _set(self, report: Json) -> None:
        if self._gauges is None:
            self._gauges = _make_gauges()
        for name, value in flat(report).items():
            which, labels = name
            self._gauges[which].labels(self.rank, *labels).set(value)


def status_folder() -> Path:
    """Where the counter files are."""
    return Path(os.environ.get("KDTREE_STATUS") or default_status_folder())


GAUGES = {
    "run_length_mean": ("Mean run length in tokens.", ("slots",)),
    "run_length_typical": ("Run length that the median token lies in.", ("slots",)),
    "tokens": ("Tokens of the live rows, or free slots.", ("slots",)),
    "runs": ("Runs by lower bound of their length.", ("slots", "at_least")),
    "allocs": ("Calls of the sorted allocator's alloc.", ()),
    "frees": ("Calls of the sorted allocator's free.", ()),
    "merges": ("Merges of freed slots into the sorted free list.", ()),
    "relocations": ("Relocations carried out.", ()),
    "relocation_drains": ("Steps left idle so that a relocation could run.", ()),
    "bytes_moved": ("Bytes moved by relocations.", ()),
    "longest_pause_ms": ("Longest pause of the scheduler for a relocation.", ()),
    "paused_ms": ("Time that the scheduler spent in relocations.", ()),
    "refused": ("Relocations refused.", ()),
}


def flat(report: Json) -> dict[tuple[str, tuple[str, ...]], float]:
    """The values of a report by gauge and labels."""
    from sglang_glue.defrag.runs import BUCKETS

    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for slots in ("live", "free"):
        stats = report[f"{slots}_runs"]
        found["run_length_mean", (slots,)] = stats["mean"]
        found["run_length_typical", (slots,)] = stats["typical"]
        found["tokens", (slots,)] = stats["tokens"]
        for bound, count in zip(BUCKETS, stats["histogram"], strict=True):
            found["runs", (slots, str(bound))] = count
    for name in ("allocs", "frees", "merges"):
        found[name, ()] = report["sorted_allocator"][name]
    counters = report["counters"]
    for name in ("relocations", "bytes_moved", "longest_pause_ms", "paused_ms"):
        found[name, ()] = counters[name]
    found["relocation_drains", ()] = counters["drains"]
    found["refused", ()] = sum(counters["refused"].values())
    return found


def _make_gauges() -> Json:
    from prometheus_client import Gauge  # not before PROMETHEUS_MULTIPROC_DIR is set

    return {
        name: Gauge(PREFIX + name, text, ("rank", *labels), multiprocess_mode="mostrecent")
        for name, (text, labels) in GAUGES.items()
    }


def _forget_the_dead(folder: Path) -> None:
    for path in folder.glob("defrag-*.json"):
        pid = path.stem.removeprefix("defrag-")
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)
