"""From the paths of a command line to case files, with what is unusable kept beside what is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from captured_tensors import (
    DEFAULT_CASES,
    CaptureCase,
    CaptureError,
    ManifestEntry,
    iter_case_paths,
    load_case,
    read_manifest,
)
from captured_tensors.manifest import check_entry


@dataclass(frozen=True)
class Unusable:
    """An input that could not be replayed, and why."""

    path: str
    error: str


@dataclass(frozen=True)
class CaseFile:
    """One case file; `entry` is its line in the manifest that named it, if one did."""

    path: Path
    entry: ManifestEntry | None = None
    root: Path = Path()

    def load(self) -> CaptureCase:
        """Check the file against the manifest's checksum and read it. Raises CaptureError."""
        if self.entry is not None:
            check_entry(self.entry, self.root)
        return load_case(self.path)


def find_cases(paths: Iterable[str | Path]) -> tuple[list[CaseFile], list[Unusable]]:
    """The case files of files, folders and manifests, each once; for no paths the shipped cases."""
    cases: dict[Path, CaseFile] = {}
    unusable = []
    for path in list(paths) or [DEFAULT_CASES]:
        try:
            for case in _expand(Path(path)):
                cases.setdefault(case.path.resolve(), case)
        except (CaptureError, OSError) as error:
            unusable.append(Unusable(str(path), message(error, path)))
    return list(cases.values()), unusable


def message(error: Exception, path: str | Path) -> str:
    """The error's text without the path in front, which is shown beside it."""
    return str(error).removeprefix(f"{path}: ")


def _expand(path: Path) -> Iterator[CaseFile]:
    if path.suffix == ".json" and not path.is_dir():
        entries = read_manifest(path).entries
        if not entries:
            raise CaptureError("cases: found none, expected at least one")
        for entry in entries:
            yield CaseFile(path.parent / entry.file, entry, path.parent)
    else:
        for file in iter_case_paths(path):
            yield CaseFile(file)
