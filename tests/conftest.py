"""Tests that need a GPU or SGLang are skipped where there is none, with the reason."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
from hypothesis import settings

# A busy machine is no failure: how long an example may take is nothing that a test here is about.
settings.register_profile("verify-numba", deadline=None)
settings.load_profile("verify-numba")

SOURCES = "VERIFY_NUMBA_TEST_SGLANG"


def no_gpu() -> str | None:
    """Why the tests marked `gpu` cannot run here, or None."""
    from verify_numba.gpu.driver import CudaUnavailable, get_driver

    try:
        get_driver()
    except CudaUnavailable as reason:
        return f"needs an NVIDIA GPU: {reason}"
    if importlib.util.find_spec("torch") is None:
        return "needs torch, which holds the buffers of the GPU tests"
    import torch

    return None if torch.cuda.is_available() else f"needs a GPU that torch can use; torch {torch.__version__} cannot"


def no_sglang() -> str | None:
    """Why the tests marked `sglang` cannot run here, or None; those that read sources alone can do with less."""
    if importlib.util.find_spec("sglang") or os.environ.get(SOURCES):
        return None
    return f"needs SGLang: none is installed, and {SOURCES} names no sources"


NEEDS: dict[str, Callable[[], str | None]] = {"gpu": no_gpu, "sglang": no_sglang}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for mark, missing in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = missing() if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
