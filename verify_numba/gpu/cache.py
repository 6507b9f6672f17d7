"""The cubin cache: one compilation a variant, whatever the number of threads and processes.

Folder: `VERIFY_NUMBA_CACHE`, else the user's cache folder of the platform. It may be shared, read-only or
deleted at any time. An entry is written beside its place and renamed, so a reader sees all of it or none.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections import defaultdict
from pathlib import Path

from filelock import FileLock, Timeout

from verify_numba.gpu.artifact import Artifact, CorruptArtifact
from verify_numba.gpu.cache_key import cache_key
from verify_numba.gpu.compile import build_artifact
from verify_numba.gpu.spec import ComputeCapability, KernelSpec, arch

FOLDER_VARIABLE = "VERIFY_NUMBA_CACHE"
LOCK_SECONDS = 600.0
"""How long to wait for another process that compiles the same variant, before compiling it here as well."""


class CubinCache:
    """Compiled variants in memory and on disk; safe for threads and processes.

    folder          None: `default_folder()`
    lock_seconds    how long to wait for a compilation in another process
    """

    def __init__(self, folder: Path | None = None, lock_seconds: float = LOCK_SECONDS):
        self.folder = default_folder() if folder is None else folder
        self._lock_seconds = lock_seconds
        self._memory: dict[str, Artifact] = {}
        self._guard = threading.Lock()
        self._key_guards: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._warned = False

    def get(self, spec: KernelSpec, cc: ComputeCapability) -> Artifact:
        """The variant compiled for `cc`: from memory, from disk, or built now. Raises CompileError."""
        key = cache_key(spec, cc)
        with self._guard:
            key_guard = self._key_guards[key]
        with key_guard:
            found = self._memory.get(key)
            if found is None:
                found = self._memory[key] = self._from_disk_or_built(spec, cc, key)
            return found

    def path(self, spec: KernelSpec, cc: ComputeCapability) -> Path:
        """Where the entry of a variant lies on disk."""
        return self._entry(spec, cc, cache_key(spec, cc))

    def _entry(self, spec: KernelSpec, cc: ComputeCapability, key: str) -> Path:
        return self.folder / f"{spec.name}-{arch(cc)}-{key[:32]}.cubin"

    def _from_disk_or_built(self, spec: KernelSpec, cc: ComputeCapability, key: str) -> Artifact:
        entry = self._entry(spec, cc, key)
        found = _read(entry, spec)
        if found is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{entry}.lock", timeout=self._lock_seconds)
            lock.acquire()
        except Timeout:
            self._warn(f"another process has held {entry}.lock for {self._lock_seconds:g} s")
            return build_artifact(spec, cc)
        except (OSError, NotImplementedError) as error:
            self._warn(str(error))
            return build_artifact(spec, cc)
        try:
            return _read(entry, spec) or self._build_and_store(spec, cc, entry)
        finally:
            lock.release()

    def _build_and_store(self, spec: KernelSpec, cc: ComputeCapability, entry: Path) -> Artifact:
        built = build_artifact(spec, cc)
        try:
            _write(entry, built.to_bytes())
        except OSError as error:
            self._warn(str(error))
        return built

    def _warn(self, reason: str) -> None:
        with self._guard:
            if self._warned:
                return
            self._warned = True
        warnings.warn(
            f"compiled kernels stay in this process's memory, the cache folder {self.folder} cannot be used: "
            f"{reason}. Set {FOLDER_VARIABLE} to a writable folder.",
            RuntimeWarning,
            stacklevel=2,
        )


def default_folder() -> Path:
    """The folder that `VERIFY_NUMBA_CACHE` names, else the platform's cache folder for this user."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("verify-numba", appauthor=False)


def _read(entry: Path, spec: KernelSpec) -> Artifact | None:
    """The entry, or None where it is absent, unreadable, damaged or of another variant: it is built anew."""
    try:
        found = Artifact.from_bytes(entry.read_bytes())
    except (OSError, CorruptArtifact):
        return None
    return found if found.name == spec.name else None


def _write(entry: Path, data: bytes) -> None:
    """All or nothing: into a file of its own first, then renamed over the entry."""
    descriptor, name = tempfile.mkstemp(prefix=f".{entry.name}.", dir=entry.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(entry)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
