"""setup.cfg against the tree: nothing that is needed stays out of an installed package, and entry points resolve."""

from __future__ import annotations

import configparser
import importlib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
PACKAGES = [line.rstrip("*") for line in CONFIG["options.packages.find"]["include"].split()]
ENTRIES = [
    line.split("=", 1)[1].strip()
    for group in CONFIG["options.entry_points"].values()
    for line in group.strip().splitlines()
]


def shipped_as_data(path: Path) -> bool:
    package, *rest = path.relative_to(ROOT).parts
    patterns = CONFIG["options.package_data"].get(package, "").split()
    return any(fnmatch("/".join(rest), pattern) for pattern in patterns)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_is_shipped(package):
    files = [p for p in (ROOT / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert files
    modules = {p for p in files if p.suffix == ".py" and (p.parent / "__init__.py").exists()}
    assert [str(p) for p in files if p not in modules and not shipped_as_data(p)] == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_entry_points_resolve(entry):
    module, name = entry.split(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_numpy_stays_below_the_release_that_numba_cuda_fails_on():
    (pin,) = [line for line in CONFIG["options"]["install_requires"].split() if line.startswith("numpy")]
    assert pin.endswith("<2.5")
