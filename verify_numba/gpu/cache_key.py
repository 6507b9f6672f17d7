"""The identity of a compiled variant: equal keys mean equal cubins."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from verify_numba.gpu.spec import ComputeCapability, KernelSpec

PACKAGE = Path(__file__).resolve().parent.parent
TOOLCHAIN = (
    "numba", "numba-cuda", "llvmlite", "cuda-bindings",
    "nvidia-nvjitlink", "nvidia-nvjitlink-cu12", "nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12",
)  # fmt: skip
"""Every package that takes part in making a cubin, for CUDA 12 and 13."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def cache_key(spec: KernelSpec, cc: ComputeCapability, source_root: Path = PACKAGE) -> str:
    """SHA-256 over the sources, the toolchain's versions, the spec's fields and `cc`.

    `source_root` is the folder whose Python files count as the kernels' sources; the file that defines
    `spec.build` counts as well. Reads files and package metadata only: importing numba is not needed.
    """
    digest = hashlib.sha256()
    sources = [_sources(source_root), *_defining_file(spec.build, source_root)]
    for part in [*sources, *_toolchain(), *_values(spec), str(cc)]:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


@functools.cache
def _sources(root: Path) -> str:
    """One digest over all Python files below `root`; read once a process, as Python itself does."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _defining_file(build: Callable[..., Any], root: Path) -> list[str]:
    while isinstance(build, functools.partial):
        build = build.func
    path = Path(inspect.getsourcefile(build) or "").resolve()
    if not path.is_file() or path.is_relative_to(root):
        return []
    return [hashlib.sha256(path.read_bytes()).hexdigest()]


@functools.cache
def _toolchain() -> tuple[str, ...]:
    versions = (f"{name}={version}" for name, version in toolchain_versions().items())
    return (*versions, os.environ.get("CUDA_HOME", ""))


def toolchain_versions() -> dict[str, str | None]:
    """Version of every package of `TOOLCHAIN`; None where it is not installed."""
    return {name: _version(name) for name in TOOLCHAIN}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _values(spec: KernelSpec) -> list[str]:
    plain = [f.name for f in fields(spec) if f.name not in ("build", "signature")]
    values = [f"{name}={getattr(spec, name)!r}" for name in plain]
    return [*values, _describe(spec.build), _describe(spec.signature)]


def _describe(value: Any) -> str:
    """A callable by what it closes over: two variants of one factory differ in that alone."""
    if isinstance(value, functools.partial):
        bound = [_describe(arg) for arg in value.args]
        bound += [f"{name}={_describe(arg)}" for name, arg in sorted(value.keywords.items())]
        return f"{_describe(value.func)}({', '.join(bound)})"
    if inspect.isfunction(value):
        cells = [_describe(cell.cell_contents) for cell in value.__closure__ or ()]
        defaults = [_describe(default) for default in value.__defaults__ or ()]
        return f"{value.__module__}.{value.__qualname__}[{', '.join(cells + defaults)}]"
    return _ADDRESS.sub("", repr(value))
