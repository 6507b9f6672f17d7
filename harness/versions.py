"""Versions of what a result depends on, read without importing any of it."""

from __future__ import annotations

import platform
from importlib import metadata

PROJECT = "verify-numba"
PACKAGES = ("numpy", "numba", "numba-cuda", "torch", "triton", "sglang", "safetensors", "ml_dtypes")


def project_version() -> str:
    """Version of this project, or 'unknown' in a checkout that was never installed."""
    return _version(PROJECT) or "unknown"


def installed_versions() -> dict[str, str | None]:
    """Version by package; None where a package is not installed."""
    return {
        PROJECT: _version(PROJECT),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
