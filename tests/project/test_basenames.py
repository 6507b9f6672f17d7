"""pytest imports test files by their bare names (folders have no `__init__.py`): two of one name cannot run at once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_test_files_have_the_same_name():
    found: dict[str, list[str]] = defaultdict(list)
    for path in TESTS.rglob("test_*.py"):
        found[path.name].append(str(path.relative_to(TESTS)))
    assert Path(__file__).name in found
    assert {name: sorted(paths) for name, paths in found.items() if len(paths) > 1} == {}
