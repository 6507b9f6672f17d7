"""What README.md and docs/ promise: commands that exist, links that lead somewhere, an example that runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from harness.commands import COMMANDS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
CI = (ROOT / ".ci" / "run").read_text()

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pages
def test_commands_exist(page):
    named = re.findall(r"(?:verify-numba|python3? -m harness) ([a-z][a-z-]+)", page.read_text())
    assert set(named) <= {command.name for command in COMMANDS}


def test_every_command_is_in_the_readme():
    table = re.findall(r"^\| `([a-z-]+)` \|", README.read_text(), re.MULTILINE)
    assert sorted(table) == sorted(command.name for command in COMMANDS)


@pages
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_files_that_the_readme_names_exist():
    named = set(re.findall(r"`([\w./]+/[\w./]+\.(?:py|md))`", README.read_text()))
    assert len(named) > 5 and [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["replay", "test"])
def test_ci_runs_the_commands_of_the_readme(name):
    """`.ci/run` takes the line that follows the marker; there is one marker and one line each."""
    (block,) = re.findall(rf"^<!-- command: {name} -->\n```sh\n(.*?)```$", README.read_text(), re.M | re.S)
    assert len(block.splitlines()) == 1 and block.startswith("python3 -m venv .venv && ")
    assert re.findall(r"^stage run_readme_command (\w+)$", CI, re.M).count(name) == 1


def test_the_example_runs():
    (example,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    names: dict[str, np.ndarray] = {}
    exec(example, names)  # noqa: S102 - it is ours
    assert np.isfinite(names["out"].astype(np.float32)).all() and np.isfinite(names["lse"]).all()
