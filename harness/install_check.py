"""`verify-numba install-check`: in which processes the plug-in is live, told by call counters and never by log lines.

Every process that loads the plug-in keeps a counter file; a running SGLang scheduler without one is not live, whatever
its log says. The verdict is about running schedulers alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.errors import UsageError
from harness.jsonio import check_target, write_json
from sglang_glue.settings import default_status_folder
from sglang_glue.status import ProcessStatus, read_statuses
from sglang_glue.summary import describe

EXIT_LIVE, EXIT_NOT_LIVE = 0, 1
SCHEDULER_TITLE = "sglang::scheduler"

LIVE = "live"
NO_CALL = "no verify call yet"
ERRORS = "live, with errors"
DECLINED = "not ours"
LOADED = "loaded"
MISSING = "NOT LOADED"


@dataclass(frozen=True)
class Row:
    """One process, or one backend of it."""

    pid: int
    alive: bool
    mode: str
    state: str
    detail: str
    is_scheduler: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", type=Path, help="counter files (default: KDTREE_STATUS, or the usual folder)"
    )
    parser.add_argument("--all", action="store_true", help="show processes that have ended too")
    parser.add_argument("--json", metavar="FILE", help="write what was found as JSON ('-' for stdout)")


def run(args: argparse.Namespace) -> int:
    if args.json:
        check_target(args.json)
    folder = args.folder or Path(os.environ.get("KDTREE_STATUS") or default_status_folder())
    rows = list(rows_of(folder, scheduler_pids()))
    shown = [row for row in rows if row.alive or args.all]
    if not shown:
        raise UsageError(
            f"no running SGLang scheduler, and no running process with the plug-in in {folder};"
            " is KDTREE_VERIFY=validate or on set for the server, and the same KDTREE_STATUS?"
        )
    running = [row for row in rows if row.alive and row.is_scheduler]
    live = bool(running) and all(row.state in (LIVE, ERRORS) for row in running)
    if args.json:
        write_json({"live": live, "processes": [vars(row) for row in shown]}, args.json)
    if args.json != "-":
        _print(shown, running, live)
    return EXIT_LIVE if live else EXIT_NOT_LIVE


def rows_of(folder: Path, schedulers: set[int]) -> Iterator[Row]:
    """Every process that has a counter file, then the running schedulers that have none."""
    known = set()
    for status in read_statuses(folder):
        if status.alive:
            known.add(status.pid)
        yield from _rows_of(status, status.pid in schedulers)
    for pid in sorted(schedulers - known):
        yield Row(
            pid, True, "", MISSING, "a scheduler without a counter file: the plug-in never ran in it", True
        )


def _rows_of(status: ProcessStatus, is_scheduler: bool) -> Iterator[Row]:
    mode = str(status.content.get("mode", ""))
    backends = status.content.get("backends") or []
    for backend in backends:
        yield Row(status.pid, status.alive, mode, _state(backend), describe(backend), True)
    if not backends:
        detail = "a scheduler with no backend that verifies" if is_scheduler else "does not run attention"
        yield Row(status.pid, status.alive, mode, LOADED, detail, is_scheduler)


def _state(backend: dict[str, Any]) -> str:
    if "counters" not in backend:
        return DECLINED
    counters = backend["counters"]
    if counters["eager_calls"] + counters["graph_calls"] == 0:
        return NO_CALL
    return ERRORS if counters["errors"] else LIVE


def scheduler_pids() -> set[int]:
    """Processes that SGLang titled as schedulers."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
        except OSError:  # it ended, or belongs to somebody else
            continue
        if title.startswith(SCHEDULER_TITLE.encode()):
            found.add(int(folder.name))
    return found


def _print(shown: list[Row], running: list[Row], live: bool) -> None:
    table = Table("pid", "mode", "state", "what it did", box=None)
    for row in shown:
        table.add_row(str(row.pid), row.mode, row.state if row.alive else f"{row.state} (ended)", row.detail)
    console = Console()
    console.print(table)
    console.print(_verdict(running, live))


def _verdict(running: list[Row], live: bool) -> str:
    if not running:
        return "No scheduler is running."
    if live:
        return f"Live in all {len(running)} scheduler backends."
    if all(row.state in (LIVE, ERRORS, NO_CALL) for row in running):
        return "Installed, but not proven yet: send the server a request that decodes, then ask again."
    return "NOT live in every scheduler."
