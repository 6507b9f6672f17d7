"""Counter files: how each process says, without a log line, that the plug-in is live in it.

`<status folder>/<run>/<pid>.json`, rewritten whole about once a second while something changes, so that a killed
process leaves its last state behind. A run is one server, named by its first process.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_VARIABLE = "_VERIFY_NUMBA_RUN"
"""Set by the first process of a server and inherited by those it spawns."""

KEPT_RUNS = 8

Json = dict[str, Any]


@dataclass(frozen=True)
class ProcessStatus:
    """One counter file as read back."""

    run: str
    pid: int
    alive: bool
    content: Json


class StatusFile:
    """This process's counter file. Raises OSError where the folder cannot be written."""

    def __init__(self, folder: Path, content: Json) -> None:
        own = f"{os.getpid()}-{_start_of(os.getpid())}"
        run = os.environ.setdefault(RUN_VARIABLE, own)
        self.run_folder = folder / run
        self.run_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = self.run_folder / f"{os.getpid()}.json"
        self._content = {"pid": os.getpid(), "started": _start_of(os.getpid()), **content}
        self._written = ""
        self.update({})
        if run == own:
            _forget_old_runs(folder)

    def update(self, content: Json) -> None:
        """Write the file again if it would differ."""
        self._content |= content
        text = json.dumps(self._content, indent=1)
        if text == self._written:
            return
        partial = self._path.with_suffix(f".{time.monotonic_ns()}.partial")
        try:
            partial.write_text(text)
            os.replace(partial, self._path)
        finally:
            partial.unlink(missing_ok=True)
        self._written = text


def read_statuses(folder: Path) -> Iterator[ProcessStatus]:
    """Every counter file below `folder`, oldest run first; unreadable ones are skipped."""
    for run in _runs(folder):
        for path in sorted(run.glob("*.json")):
            try:
                content = json.loads(path.read_text())
                pid = int(content["pid"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
            yield ProcessStatus(run.name, pid, _start_of(pid) == content.get("started"), content)


def _runs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((run for run in folder.iterdir() if run.is_dir()), key=lambda run: run.stat().st_mtime)


def _forget_old_runs(folder: Path) -> None:
    finished = [run for run in _runs(folder) if not any(_start_of(int(p.stem)) for p in run.glob("[0-9]*.json"))]
    for run in finished[:-KEPT_RUNS]:
        shutil.rmtree(run, ignore_errors=True)


def _start_of(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot: tells a process from a later one with its pid."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
