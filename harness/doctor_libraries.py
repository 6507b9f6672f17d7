"""Installed libraries with CUDA kernels, and how much of each runs on a given GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.fatbin import ComputeCapability, Module, read_modules

PACKAGES = ("sgl_kernel", "flashinfer", "flashinfer_jit_cache", "flash_mla", "deep_gemm")
"""Import names; a package that is not installed is reported as such."""
WITHOUT = {"flashinfer": "brings no compiled kernels; compiles them on first use, with nvcc and ninja"}
JIT_CACHE = "flashinfer, compiled here"


@dataclass(frozen=True)
class Library:
    """One shared library: `modules` are its translation units with device code."""

    package: str
    file: str
    modules: Sequence[Module]

    def coverage(self, gpu: ComputeCapability) -> dict[str, int]:
        """Modules that run on `gpu` as they are (`sass`), after compilation by the driver (`ptx`), or not at all."""
        counts = {"sass": 0, "ptx": 0, "none": 0}
        for module in self.modules:
            fitting = [target for target in module if target.runs_on(gpu)]
            best = "none" if not fitting else "ptx" if all(target.ptx for target in fitting) else "sass"
            counts[best] += 1
        return counts

    def verdict(self, gpu: ComputeCapability) -> str:
        """One phrase for a reader."""
        counts, total = self.coverage(gpu), len(self.modules)
        usable = counts["sass"] + counts["ptx"]
        if usable == 0:
            return "no code for it"
        how = "code" if not counts["ptx"] else "PTX only" if not counts["sass"] else "code, some as PTX"
        return f"{how}, {usable} of {total} modules"

    def targets(self, ptx: bool) -> list[str]:
        found = {target for module in self.modules for target in module if target.ptx == ptx}
        return [str(target) for target in sorted(found)]

    def as_json(self, gpus: Sequence[ComputeCapability]) -> dict[str, Any]:
        return {
            "package": self.package,
            "file": self.file,
            "modules": len(self.modules),
            "sass": self.targets(ptx=False),
            "ptx": self.targets(ptx=True),
            "coverage": {f"{major}.{minor}": self.coverage((major, minor)) for major, minor in gpus},
        }


def find_libraries() -> tuple[list[Library], dict[str, str]]:
    """All libraries with device code, and for each package without any the reason."""
    found: list[Library] = []
    reasons: dict[str, str] = {}
    for package in PACKAGES:
        folder = _folder(package)
        if folder is None:
            reasons[package] = "not installed"
            continue
        libraries = list(_libraries(package, folder))
        found += libraries
        if not libraries:
            reasons[package] = WITHOUT.get(package, "no compiled kernels inside")
    return found + list(_libraries(JIT_CACHE, _jit_cache())), reasons


def _libraries(package: str, folder: Path) -> Iterator[Library]:
    for path in sorted(folder.rglob("*.so")):
        try:
            modules = read_modules(path)
        except OSError:  # a dangling link or an unreadable file has no kernels that anybody could load
            continue
        if modules:
            yield Library(package, str(path.relative_to(folder)), modules)


def _folder(package: str) -> Path | None:
    """Where a package is installed, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def _jit_cache() -> Path:
    """Where FlashInfer keeps what it compiled."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"
