"""A benchmark suite: `pytest tests/benchmarks`. A run of all tests leaves it out, since it measures and asserts little.

Save and compare runs with pytest-benchmark's own options: --benchmark-autosave, --benchmark-compare.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collected only where a path in here is named on the command line."""
    named = [
        Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args
    ]
    if any(path.is_relative_to(HERE) for path in named):
        return None
    return True if collection_path.is_relative_to(HERE) else None
