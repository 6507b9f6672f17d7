"""Cases on disk: one safetensors file a case, never a pickle."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save as to_safetensors

from captured_tensors.case import CaptureCase
from captured_tensors.manifest import DEFAULT_CASES, check_entry, read_manifest
from captured_tensors.meta import CaptureMeta
from captured_tensors.schema import BF16, Array, CaptureError, check_names, fail

SUFFIX = ".safetensors"

_DTYPES = {
    "BF16": BF16,
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
}


def load_case(path: str | os.PathLike[str]) -> CaptureCase:
    """Read one case; its name is the file's name without the suffix.

    Raises:
        CaptureError: the file cannot be read, is truncated or foreign, or breaks the schema.
    """
    path = Path(path)
    try:
        entries, tensors = _parse(path.read_bytes())
        meta = CaptureMeta.from_strings(entries)
        check_names(frozenset(tensors), meta.mask_layout)
        for name in ("custom_mask", "mask_indptr"):
            tensors.setdefault(name, None)
        return CaptureCase(name=path.name.removesuffix(SUFFIX), meta=meta, **tensors)
    except OSError as err:
        raise CaptureError(f"{path}: cannot be read: {err.strerror}") from err
    except CaptureError as err:
        raise CaptureError(f"{path}: {err}") from None


def save_case(case: CaptureCase, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write one case; the file appears whole or not at all.

    Raises:
        CaptureError: the file is there already and ``overwrite`` is False, its name lacks the suffix, or it
            cannot be written (the OSError is the cause).
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise CaptureError(f"{path}: a case file ends in {SUFFIX}")
    if path.exists() and not overwrite:
        raise CaptureError(f"{path}: is there already")
    arrays = {name: np.ascontiguousarray(array) for name, array in case.tensors().items()}
    try:
        _write_whole(path, to_safetensors(arrays, metadata=case.meta.to_strings()))
    except OSError as err:
        raise CaptureError(f"{path}: cannot be written: {err.strerror}") from err


def load_manifest(path: str | os.PathLike[str] = DEFAULT_CASES) -> list[CaptureCase]:
    """Read every case of a manifest, checksums checked.

    Raises:
        CaptureError: the manifest or one of its files is unusable.
    """
    return [load_case(file) for file in iter_case_paths(path)]


def iter_case_paths(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The case files that ``path`` stands for: itself, those below a folder, or those of a manifest (.json).

    Files of a manifest are checked against its sha256 and size as they are reached.

    Raises:
        CaptureError: nothing is there, or a manifest or its file is unusable.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.rglob(f"*{SUFFIX}"))
        if not files:
            raise CaptureError(f"{path}: no {SUFFIX} file in this folder")
        yield from files
    elif path.suffix == ".json":
        for entry in read_manifest(path).entries:
            check_entry(entry, path.parent)
            yield path.parent / entry.file
    elif path.exists():
        yield path
    else:
        raise CaptureError(f"{path}: no such file or folder")


def _parse(data: bytes) -> tuple[Mapping[str, str], dict[str, Any]]:
    try:
        parts = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as err:
        raise CaptureError(f"not a whole safetensors file: {err}") from None
    # The library has checked the header; only its metadata is not handed out with the tensors.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__") or {}, {name: _view(name, part) for name, part in parts}


def _view(name: str, part: Mapping[str, Any]) -> Array:
    dtype = _DTYPES.get(part["dtype"])
    if dtype is None:
        raise fail(name, f"dtype {part['dtype']}", " or ".join(_DTYPES))
    return np.frombuffer(part["data"], dtype=dtype).reshape(part["shape"])


def _write_whole(path: Path, data: bytes) -> None:
    """Write beside the target, flush to the disk, then rename: readers never see a half file."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
