"""The list of cases that ship together: checksums, sizes, shapes and provenance in one JSON file."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from captured_tensors.case import CaptureCase
from captured_tensors.schema import CaptureError, fail

DEFAULT_CASES = Path(__file__).parent / "cases" / "manifest.json"
"""The manifest of the shipped cases."""

VERSION = 1


@dataclass(frozen=True)
class ManifestEntry:
    """One case file: what it is, what it must hash to, and where it comes from."""

    name: str
    file: str
    """Relative to the manifest's folder."""
    sha256: str
    bytes: int
    algorithm: str
    bs: int
    T: int
    H: int
    prefix_lengths: list[int]
    layer_id: int
    gpu: str
    versions: dict[str, str]
    how: str
    """How the step was taken, in a sentence."""


@dataclass(frozen=True)
class Manifest:
    """The entries of one manifest file."""

    entries: tuple[ManifestEntry, ...]

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"version": VERSION, "cases": [asdict(e) for e in self.entries]}, indent=1) + "\n"


def read_manifest(path: str | os.PathLike[str] = DEFAULT_CASES) -> Manifest:
    """Parse a manifest; the files it names are not touched.

    Raises:
        CaptureError: unreadable, not JSON, or an entry has missing, unknown or mistyped keys.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _parse(content)
    except OSError as err:
        raise CaptureError(f"{path}: cannot be read: {err.strerror}") from err
    except ValueError as err:
        reason = str(err) if isinstance(err, CaptureError) else f"not JSON: {err}"
        raise CaptureError(f"{path}: {reason}") from None


def describe(case: CaptureCase, file: Path, root: Path) -> ManifestEntry:
    """The entry for ``case``, stored in ``file`` under the manifest's folder ``root``."""
    meta = case.meta
    how = (
        f"{meta.mode}: arguments, metadata and result of the Triton attention backend's forward_extend "
        f"at layer {meta.layer_id}, {meta.algorithm}, {meta.model}"
    )
    return ManifestEntry(
        name=case.name,
        file=file.relative_to(root).as_posix(),
        sha256=sha256(file),
        bytes=file.stat().st_size,
        algorithm=meta.algorithm,
        bs=case.bs,
        T=case.T,
        H=case.H,
        prefix_lengths=list(case.prefix_lengths),
        layer_id=meta.layer_id,
        gpu=meta.gpu,
        versions={"sglang": meta.sglang, "torch": meta.torch, "triton": meta.triton},
        how=how,
    )


def check_entry(entry: ManifestEntry, root: Path) -> None:
    """Compare a file's size and sha256 with its entry.

    Raises:
        CaptureError: the file is missing or is not the one that the entry describes.
    """
    file = root / entry.file
    try:
        size, digest = file.stat().st_size, sha256(file)
    except OSError as err:
        raise CaptureError(f"{file}: cannot be read: {err.strerror}") from err
    if (size, digest) != (entry.bytes, entry.sha256):
        found, expected = f"{digest} ({size} bytes)", f"{entry.sha256} ({entry.bytes} bytes)"
        raise fail(f"{file}: sha256", found, expected)


def sha256(file: Path) -> str:
    """Hex digest of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _parse(content: Any) -> Manifest:
    if not isinstance(content, dict) or content.get("version") != VERSION:
        found = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise fail("version", found, VERSION)
    cases = content.get("cases")
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise fail("cases", type(cases).__name__, "a list of objects")
    return Manifest(tuple(_entry(i, case) for i, case in enumerate(cases)))


def _entry(i: int, case: dict[str, Any]) -> ManifestEntry:
    names = {f.name for f in fields(ManifestEntry)}
    if set(case) != names:
        raise fail(f"cases[{i}]", f"keys {', '.join(sorted(case))}", ", ".join(sorted(names)))
    for f in fields(ManifestEntry):
        kind = {"str": str, "int": int, "list[int]": list, "dict[str, str]": dict}[str(f.type)]
        if not isinstance(case[f.name], kind):
            raise fail(f"cases[{i}].{f.name}", repr(case[f.name]), f.type)
    file = PurePosixPath(case["file"])
    if file.is_absolute() or ".." in file.parts:
        raise fail(f"cases[{i}].file", case["file"], "a path below the manifest's folder")
    return ManifestEntry(**case)
