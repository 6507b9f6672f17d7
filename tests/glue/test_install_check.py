"""What install-check concludes from counter files and from the processes that run."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from harness import install_check
from harness.errors import UsageError
from sglang_glue.settings import Mode
from sglang_glue.status import RUN_VARIABLE, StatusFile
from tests.glue.fakes import FakeVerifier, make_call
from tests.glue.slots import make_slot
from tests.glue.test_status import report_of

REAL_SCHEDULER_PIDS = install_check.scheduler_pids


@pytest.fixture(autouse=True)
def no_other_server(monkeypatch):
    monkeypatch.setenv(RUN_VARIABLE, "test")
    monkeypatch.setattr(install_check, "scheduler_pids", lambda: {os.getpid()})


def check(folder, *, json_to=None):
    return install_check.run(SimpleNamespace(folder=folder, all=False, json=json_to))


def served(calls, verifier=None):
    call = make_call()
    slot = make_slot(Mode.ON, calls=[call], verifier=verifier)
    for _ in range(calls):
        slot(*call)
    return report_of(slot)


def test_counted_calls_prove_it(tmp_path, capsys):
    StatusFile(tmp_path, {"mode": "on", "backends": [served(2)]})
    assert check(tmp_path) == 0
    assert "Live in all 1 scheduler backends" in capsys.readouterr().out


def test_an_installed_hook_without_a_call_proves_nothing(tmp_path, capsys):
    StatusFile(tmp_path, {"mode": "on", "backends": [served(0)]})
    assert check(tmp_path) == 1
    assert "not proven yet" in capsys.readouterr().out


def test_a_scheduler_without_a_file_is_not_live(tmp_path, capsys):
    assert check(tmp_path) == 1
    assert "NOT LOADED" in capsys.readouterr().out


def test_one_of_two_ranks_declined_is_not_live(tmp_path, capsys):
    declined = {"rank": "tp1", "mode": "on", "declined": "page_size"}
    StatusFile(tmp_path, {"mode": "on", "backends": [served(2), declined]})
    assert check(tmp_path) == 1
    assert "NOT live in every scheduler" in capsys.readouterr().out


def test_only_errors_is_not_live(tmp_path):
    StatusFile(tmp_path, {"mode": "on", "backends": [served(2, FakeVerifier(error=ValueError("x")))]})
    assert check(tmp_path) == 1


def test_ended_processes_are_no_proof(tmp_path, monkeypatch):
    StatusFile(tmp_path, {"mode": "on", "backends": [served(2)]}).update({"started": 1})
    monkeypatch.setattr(install_check, "scheduler_pids", set)
    with pytest.raises(UsageError, match="no running SGLang scheduler"):
        check(tmp_path)


def test_json(tmp_path):
    StatusFile(tmp_path / "status", {"mode": "on", "backends": [served(2)]})
    check(tmp_path / "status", json_to=str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["live"] and found["processes"][0]["state"] == "live" and found["processes"][0]["pid"] == os.getpid()


def test_schedulers_are_found_by_their_title():
    code = "import time; time.sleep(60)"
    titled = subprocess.Popen(["sglang::scheduler_TP0", "-c", code], executable=sys.executable)
    other = subprocess.Popen(["sglang::detokenizer", "-c", code], executable=sys.executable)
    try:
        found = REAL_SCHEDULER_PIDS()
        assert titled.pid in found and other.pid not in found and os.getpid() not in found
    finally:
        titled.kill()
        other.kill()
        titled.wait()
        other.wait()
