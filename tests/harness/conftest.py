from __future__ import annotations

import shutil

import pytest

from harness import replay_command
from tests.harness.fakes import SMALL_CASE, FakeVerifier


@pytest.fixture
def fake(monkeypatch):
    """The command line with a fake in the place of every Verifier."""
    verifier = FakeVerifier()
    monkeypatch.setattr(replay_command, "Verifiers", lambda device, **settings: lambda case: verifier)
    return verifier


@pytest.fixture
def case_file(tmp_path):
    """A copy of a small shipped case in a folder of its own."""
    return shutil.copy(SMALL_CASE, tmp_path / "small.safetensors")
