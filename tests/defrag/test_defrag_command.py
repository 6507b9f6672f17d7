"""`defrag` from the command line: results, exit codes and errors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from harness import defrag
from harness.defrag_content import ContentError
from harness.defrag_sim import Server
from harness.defrag_trace import Arrival, read_trace
from harness.errors import UsageError

QUICK = ["--backend", "model", "--steps", "400", "--slots", "2048", "--context", "512", "--running", "6"]


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    defrag.add_arguments(parser)
    return defrag.run(parser.parse_args([*QUICK, *argv]))


def test_all_tiers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "result.json"
    assert run("--json", str(target), "--block", "0", "--low", "64", "--high", "128") == 0
    result = json.loads(target.read_text())
    assert [t["tier"] for t in result["tiers"]] == ["off", "sort", "relocate"]
    assert all(
        t["broken"] is None and t["allocator_calls"] > 300 and t["totals"]["steps"] == 400
        for t in result["tiers"]
    )
    off, _, relocate = result["tiers"]
    assert off["bytes_moved"] == 0 < relocate["bytes_moved"]
    assert relocate["bytes_moved"] == relocate["totals"]["rows_moved"] * 61 * 1152
    assert relocate["mean_run_second_half"] > off["mean_run_second_half"]
    assert "invariants hold" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_result(tmp_path: Path) -> None:
    results = []
    for target in ("a", "b"):
        run("--tier", "relocate", "--seed", "4", "--json", str(tmp_path / target))
        tier = json.loads((tmp_path / target).read_text())["tiers"][0]
        for name in ("planning_seconds", "longest_planning_seconds"):
            tier["totals"].pop(name)
        results.append((tier["totals"], tier["samples"]))
    assert results[0] == results[1]


def test_a_broken_invariant_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(self: Server) -> None:
        raise ContentError("request 7: token 3 of 9 reads slot 12, layer 0, which holds another row")

    monkeypatch.setattr(Server, "check", check)
    assert run("--tier", "sort") == 1
    assert "BROKEN: request 7: token 3 of 9 reads slot 12" in " ".join(capsys.readouterr().out.split())


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "runs.png"
    assert run("--tier", "sort", "--plot", str(target)) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps 0: expected at least 1"),
        (["--slots", "100"], "--slots 100: expected at least 530"),
        (["--low", "40"], "low, high: found 40.0, 32.0"),
        (["--budget", "0"], "budget_bytes: found 0"),
        (["--load", "0"], "--load 0.0: expected more than 0"),
        (["--seed", "-1"], "--seed -1: expected at least 0"),
        (["--interval", "0"], "--interval 0: expected at least 1"),
        (["--plot", "x.svg"], "--plot x.svg: expected a name that ends in .png"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: the folder /nowhere does not exist"),
    ],
)
def test_bad_arguments_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        run(*argv)


GOOD = '{"at": 0, "prompt": 40, "output": 9, "family": 1, "shared": 20, "abort": null}\n'


def test_a_trace_is_played_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        GOOD + '{"at": 3, "prompt": 30, "output": 5, "abort": 2}\n\n' + GOOD.replace('"at": 0', '"at": 9')
    )
    assert run("--trace", str(trace), "--tier", "off") == 0
    assert "2 finished, 1 aborted" in " ".join(capsys.readouterr().out.split())
    first = read_trace(str(trace), 512)[0]
    assert first == Arrival(at=0, prompt=40, output=9, family=1, shared=20, abort=None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: found list, expected an object"),
        ('{"at": 1, "prompt": 5}', "line 2: output is None, expected an integer of at least 1"),
        ('{"at": 1, "prompt": true, "output": 1}', "line 2: prompt is True"),
        (
            '{"at": 1, "prompt": 5, "output": 1, "shared": 6}',
            "line 2: shared is 6, expected at most the prompt's 5",
        ),
        ('{"at": 1, "prompt": 5, "output": 1, "colour": 6}', "line 2: unknown field 'colour'"),
        ('{"at": 1, "prompt": 500, "output": 13}', "line 2: prompt . output is 513 tokens"),
        ('{"at": -1, "prompt": 5, "output": 1}', "line 2: at is -1"),
    ],
)
def test_a_bad_trace_is_refused_by_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(GOOD + line + "\n")
    with pytest.raises(UsageError, match=message):
        read_trace(str(trace), 512)


def test_a_trace_goes_forward_and_is_not_empty(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(GOOD.replace('"at": 0', '"at": 5') + GOOD)
    with pytest.raises(UsageError, match="line 2: at is 0, expected at least 5"):
        read_trace(str(trace), 512)
    trace.write_text("\n")
    with pytest.raises(UsageError, match="holds no arrivals"):
        read_trace(str(trace), 512)
