"""Load single kernel modules of an installed SGLang without importing SGLang.

Its kernels are plain Triton, but `import sglang` pulls in a whole server. The packages above a kernel module are
replaced for the length of the import by empty ones that only know their folder, and `sglang.srt.utils`, which the
kernels ask about the hardware, by one that answers. Afterwards `sys.modules` is as before. Where a release wants
more than that, SGLang is imported whole.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import torch

KERNEL_FOLDERS = (
    "sglang.kernels.ops.attention",
    "sglang.srt.layers.attention.triton_ops",
)
"""Where the releases keep their attention kernels, newest first."""
UTILS = "sglang.srt.utils"


class NotInThisRelease(ImportError):
    """SGLang is installed but has no such kernel module."""


@functools.cache
def load_kernel_module(name: str) -> ModuleType:
    """The module `name` from the first folder in KERNEL_FOLDERS that has it. Raises ImportError with a reason."""
    root = _root()
    if root is None:
        raise ImportError("sglang is not installed")
    for folder in KERNEL_FOLDERS:
        if (root.parent / Path(*folder.split(".")) / f"{name}.py").is_file():
            return _import(root, folder, name)
    raise NotInThisRelease(f"the installed sglang has no {name}.py in {' or '.join(KERNEL_FOLDERS)}")


def _import(root: Path, folder: str, name: str) -> ModuleType:
    if "sglang" not in sys.modules:
        with suppress(ImportError), _light_packages(root, [folder, UTILS]):
            return importlib.import_module(f"{folder}.{name}")
    return importlib.import_module(f"{folder}.{name}")


def _root() -> Path | None:
    """Folder of the installed package, found without importing it."""
    if "sglang" in sys.modules:
        file = sys.modules["sglang"].__file__
        return Path(file).parent if file else None
    spec = importlib.util.find_spec("sglang")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


@contextmanager
def _light_packages(root: Path, names: Sequence[str]) -> Iterator[None]:
    try:
        for name in names:
            _add_with_parents(root, name)
        sys.modules[UTILS] = _hardware_questions()
        yield
    finally:
        for name in [n for n in sys.modules if n == "sglang" or n.startswith("sglang.")]:
            del sys.modules[name]


def _add_with_parents(root: Path, dotted: str) -> None:
    parts = dotted.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(root.parent / Path(*parts[:depth]))]
            sys.modules[name] = package


def _hardware_questions() -> ModuleType:
    """The questions answered by torch; other `is_...()` ask about hardware that this project has no use for."""
    module = ModuleType(UTILS)
    answers = {"is_cuda": torch.cuda.is_available, "get_device_core_count": _sm_count}

    def answer(name: str) -> object:
        if name in answers:
            return answers[name]
        if name.startswith("is_"):
            return lambda: False
        raise AttributeError(f"{UTILS} is replaced here and has no {name}")

    module.__getattr__ = answer  # type: ignore[method-assign]
    return module


def _sm_count(device_id: int = 0) -> int:
    return torch.cuda.get_device_properties(device_id).multi_processor_count
