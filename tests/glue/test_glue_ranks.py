"""Two ranks as two real processes: they agree at the start, fall back together, and keep their files apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_glue.ranks import FallbackFlag, RanksApart
from sglang_glue.settings import Mode
from sglang_glue.status import RUN_VARIABLE, read_statuses
from tests.glue.fakes import FakeVerifier, make_call
from tests.glue.slots import make_slot
from tests.glue.test_status import report_of

ROOT = Path(__file__).resolve().parents[2]


def both(folder: Path, scene: str, **env: str) -> list:
    """What rank 0 and rank 1 printed."""
    command = [sys.executable, "-m", "tests.glue.rank_process"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(folder), scene], cwd=ROOT, env={**os.environ, **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_one_rank_that_cannot_serve_leaves_the_backend_to_triton_on_all(tmp_path):
    assert both(tmp_path, "agreeing") == [["tp1: kv_pool", None], ["kv_pool", None]]


def test_a_rank_that_does_not_answer_ends_the_start(tmp_path):
    said, _ = both(tmp_path, "absent")
    assert "tp0: not every rank said within 1 s" in said and "KDTREE_VERIFY=off" in said


def test_after_an_error_on_one_rank_all_leave_eager_steps_to_triton(tmp_path):
    zero, one = both(tmp_path, "failing")
    assert zero[0] == [True, True, True, False, False] and one[0] == [True, True, False, False, False]
    for _, declines, message, in_capture in (zero, one):
        assert declines["eager"] == {"rank_fallback": 2}
        assert message == "tp1 fell back: ValueError: out of registers"
        assert message in in_capture and "before all CUDA graphs were captured" in in_capture


def test_an_error_in_a_capture_ends_the_start_on_every_rank(tmp_path):
    zero, one = both(tmp_path, "capturing")
    assert "tp1 fell back: ValueError: cold, before all CUDA graphs were captured" in zero
    assert "tp1 fell back: ValueError: cold, while a CUDA graph was captured" in one


def test_the_only_rank_falls_back_in_a_capture_as_ever():
    slot = make_slot(Mode.ON, calls=[make_call()], verifier=FakeVerifier(error=ValueError("x")), in_graph=lambda: True)
    assert slot(*make_call()) is False
    assert slot.counters.snapshot()["errors"] == {"ValueError": 1}


def test_the_first_rank_to_fall_back_is_remembered_and_logged_once(tmp_path, caplog):
    first, second = FallbackFlag(tmp_path, "tp0"), FallbackFlag(tmp_path, "tp1")
    assert not second.is_raised and second.message is None
    first.raise_it(ValueError("a" * 1000))
    second.raise_it(KeyError("later"))
    assert second.is_raised and second.is_raised and first.message == second.message
    assert second.message.startswith("tp0 fell back: ValueError: aaa") and len(second.message) < 300
    assert len(caplog.records) == 1


def test_the_report_names_the_rank_that_fell_back(tmp_path):
    from sglang_glue.summary import describe

    flag = FallbackFlag(tmp_path, "tp1")
    slot = make_slot(Mode.ON, calls=[make_call()], ranks=flag)
    flag.raise_it(ValueError("x"))
    report = report_of(slot, ranks={"size": 2, "fallback": flag.message})
    assert "RANKS FELL BACK (tp1 fell back: ValueError: x)" in describe(report)


def test_a_flag_raised_before_the_capture_ends_the_start(tmp_path):
    flag = FallbackFlag(tmp_path, "tp0")
    flag.raise_it(ValueError("x"))
    slot = make_slot(Mode.VALIDATE, calls=[make_call()], ranks=flag, in_graph=lambda: True)
    with pytest.raises(RanksApart):
        slot(*make_call())


def test_files_of_two_ranks_that_start_at_once_carry_the_rank(tmp_path):
    """The kernel cache's own races are in tests/gpu/test_cache_races.py."""
    run = {RUN_VARIABLE: "one-server"}
    zero, one = both(tmp_path, "files", **run)
    assert len(zero) == len(one) == 1 and "-tp0-" in zero[0] and "-tp1-" in one[0]
    assert sorted(path.name for path in (tmp_path / "cases").iterdir()) == sorted(zero + one)
    statuses = list(read_statuses(tmp_path / "status"))
    assert {s.run for s in statuses} == {"one-server"}
    assert sorted(b["rank"] for s in statuses for b in s.content["backends"]) == ["tp0", "tp1"]
