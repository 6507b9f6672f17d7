"""The peers' bindings against the kernels of an installed SGLang."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = all(importlib.util.find_spec(name) for name in ("sglang", "triton"))


@pytest.mark.sglang
@pytest.mark.skipif(not HERE, reason="needs SGLang and Triton")
def test_real_kernels_compute_what_the_bindings_say():
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.interpreted_peers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines["sglang-triton"] == "green"
    assert lines["sglang-sharedkv"] == "green" or "has no verify_mla.py" in lines["sglang-sharedkv"]
