"""Result files of `bench` and `bench-context`, read and checked before anything is drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import UsageError

BENCH, CONTEXT = "verify-numba-bench/1", "verify-numba-context/1"
NEEDED = {
    BENCH: ("H", "T", "bs", "lengths", "slots", "run_length", "mode", "nsplit"),
    CONTEXT: ("context", "decode_tokens_per_s"),
}

Record = dict[str, Any]


@dataclass(frozen=True)
class ResultFile:
    """One result: `kind` is its schema, `records` its measured rows (those with a time)."""

    path: Path
    kind: str
    result: dict[str, Any]
    records: list[Record] = field(repr=False)

    @property
    def machine(self) -> str:
        machine = self.result.get("machine") or {}
        return machine.get("gpu") or machine.get("platform") or "unknown machine"

    @property
    def label(self) -> str:
        return str(self.result.get("label") or self.path.stem)


def load_results(paths: Sequence[str]) -> list[ResultFile]:
    """Raises UsageError naming the file, what was found and what was expected."""
    return [_load(Path(path)) for path in paths]


def of_kind(files: Sequence[ResultFile], kind: str) -> list[ResultFile]:
    return [file for file in files if file.kind == kind and file.records]


def _load(path: Path) -> ResultFile:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error})") from error
    kind = result.get("schema") if isinstance(result, dict) else None
    if kind not in NEEDED:
        raise UsageError(f"{path}: schema is {kind!r}, expected {' or '.join(NEEDED)}")
    return ResultFile(path, kind, result, _records(path, kind, result.get("results")))


def _records(path: Path, kind: str, rows: Any) -> list[Record]:
    if not isinstance(rows, list):
        raise UsageError(f"{path}: results is {type(rows).__name__}, expected a list")
    for position, row in enumerate(rows):
        lacking = [name for name in NEEDED[kind] if not isinstance(row, dict) or name not in row]
        if lacking:
            raise UsageError(f"{path}: results[{position}] has no {', '.join(lacking)}")
    measured = "us" if kind == BENCH else "decode_tokens_per_s"
    return [row for row in rows if row.get(measured) is not None]
