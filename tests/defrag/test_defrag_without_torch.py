"""The simulator's own model of a server needs no torch: neither at import nor while it runs."""

import sys

import pytest

from harness.cli import main


def test_the_simulator_runs_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("harness", "torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["defrag", "--steps", "200", "--backend", "model"]) == 0
    assert "relocate" in capsys.readouterr().out
