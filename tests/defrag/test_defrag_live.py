"""The live comparison without an engine: requests, churn, what counts as a fault, and what is printed."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from harness import defrag, defrag_live, defrag_live_run
from harness.defrag_live_jobs import Job, jobs_of
from harness.defrag_live_report import faults_of, print_runs
from harness.defrag_live_run import TierRun, TierRunner
from harness.defrag_live_worker import Progress, Series, churn, differences, first_difference, serve
from harness.errors import UsageError
from harness.live_spec import LiveSpec
from sglang_glue.defrag.model_pools import SortCounters
from sglang_glue.defrag.runs import BUCKETS


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    defrag.add_arguments(parser)
    args = parser.parse_args(["--live", *argv])
    for name, value in defrag_live.DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def spec(*argv: str) -> LiveSpec:
    return defrag_live.spec_of(arguments(*argv))


class TestJobs:
    def test_they_are_the_same_for_every_tier_and_go_through_the_pool(self) -> None:
        jobs = jobs_of(spec())
        assert jobs == jobs_of(spec()) and len(jobs) == 240
        assert sum(len(j.prompt) + j.new_tokens for j in jobs) > 3 * 24_576
        assert 5 < sum(j.abort is not None for j in jobs) < 60
        assert max(len(j.prompt) for j in jobs) > defrag_live.CHUNK, "some are prefilled in several steps"
        assert all(len(j.prompt) + j.new_tokens <= 2304 and j.new_tokens >= 1 for j in jobs)

    def test_some_share_a_prefix(self) -> None:
        beginnings = [tuple(j.prompt[:32]) for j in jobs_of(spec()) if len(j.prompt) >= 32]
        assert len(beginnings) - len(set(beginnings)) > 50


class FakeEngine:
    """Answers a request with the numbers from 0 on; notes what was sent and aborted."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.aborted: list[str] = []
        self.tokenizer_manager = SimpleNamespace(abort_request=lambda rid: self.aborted.append(rid))
        self.asked: list[list[int]] = []

    async def async_generate(self, input_ids: list[int], sampling_params: Any, rid: str, stream: bool) -> Any:
        assert stream
        return self._chunks(sampling_params["max_new_tokens"], rid)

    async def _chunks(self, count: int, rid: str) -> AsyncIterator[dict[str, Any]]:
        self.running += 1
        self.most = max(self.most, self.running)
        for i in range(1, count + 1):
            await asyncio.sleep(0)
            yield {"output_ids": list(range(i)), "meta_info": {"spec_verify_ct": i}}
            if rid in self.aborted:
                break
        self.running -= 1

    def generate(self, input_ids: list[list[int]], **kwargs: Any) -> list[dict[str, Any]]:
        self.asked += input_ids
        top = [(-0.5, 1, None), (-0.53, 9, None)]
        return [{"meta_info": {"output_top_logprobs": [top]}} for _ in input_ids]

    def flush_cache(self) -> SimpleNamespace:
        return SimpleNamespace(success=True)


def report(step: int, tier: str = "relocate", mean: float = 4.0, **counters: Any) -> dict[str, Any]:
    runs = {"tokens": 100, "runs": 25, "mean": mean, "typical": 4, "longest": 9}
    runs["histogram"] = [5] * 4 + [0] * (len(BUCKETS) - 4)  # type: ignore[assignment]
    counts = {"looks": 9, "drains": 2, "relocations": 3, "rows_moved": 40, "bytes_moved": 184_320}
    counts |= {"refused": {}, "last_plan": "", "longest_pause_ms": 4.0, "paused_ms": 9.0}  # type: ignore[dict-item]
    return {
        "rank": "0",
        "tier": tier,
        "step": step,
        "relocation": "on",
        "sorted_allocator": vars(SortCounters(allocs=7)),
        "counters": {**counts, **counters},
        "live_runs": runs,
        "free_runs": runs,
    }


class TestChurn:
    def test_every_job_is_served_and_few_at_once(self, tmp_path: Path) -> None:
        jobs = [Job([2, 3], 5, None), Job([2], 9, 3), *(Job([4], 2, None) for _ in range(20))]
        engine = FakeEngine()
        (tmp_path / "defrag-7.json").write_text(json.dumps(report(16)))
        series = Series(tmp_path)
        answers = asyncio.run(churn(engine, jobs, series, 4))
        assert engine.most == 4
        assert answers[0] == {"aborted": False, "tokens": [0, 1, 2, 3, 4], "steps": 5}
        assert answers[1] == {"aborted": True, "tokens": None, "steps": 3} and engine.aborted == ["churn-1"]
        assert [one["report"]["step"] for one in series.reports] == [16], "an unchanged report is taken once"

    def test_reports_in_the_middle_of_a_change_are_left_for_later(self, tmp_path: Path) -> None:
        series = Series(tmp_path)
        (tmp_path / "defrag-7.json").write_text('{"rank": "0", ')
        series.poll()
        (tmp_path / "defrag-7.json").write_text(json.dumps(report(32)))
        (tmp_path / "defrag-8.json").write_text(json.dumps({**report(32), "rank": "1"}))
        series.poll()
        assert [one["report"]["rank"] for one in series.reports] == ["0"]
        assert [one["rank"] for one in series.latest()] == ["0", "1"]

    def test_a_failure_half_way_leaves_what_was_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KDTREE_STATUS", str(tmp_path))
        small, progress = spec("--requests", "9", "--lengths", "64"), Progress(tmp_path / "off.json")
        engine: Any = FakeEngine()
        engine.loop = asyncio.new_event_loop()
        engine.generate = lambda **kwargs: [] if "stream" not in kwargs else iter(())
        with pytest.raises(RuntimeError, match="streamed no chunk"):
            serve(engine, small, progress, None)
        engine.loop.close()
        left = json.loads((tmp_path / "off.json").read_text())
        assert len(left["answers"]) == 9 and left["churn_s"] > 0 and not left["complete"]
        assert "9 requests in" in (tmp_path / "off.progress").read_text()


class TestDifferences:
    def test_where_answers_part(self) -> None:
        assert first_difference([1, 2, 3], [1, 2, 3]) is None
        assert first_difference([1, 2, 3], [1, 9, 3]) == 1
        assert first_difference([1, 2, 3], [1, 2]) == 2

    def test_the_engine_is_asked_how_close_the_tokens_were(self) -> None:
        jobs = [Job([7], 3, None), Job([8], 3, None), Job([9], 3, None)]
        base = [{"tokens": t} for t in ([5, 1, 2], None, [5, 5, 5])]
        ours = [{"tokens": t} for t in ([5, 9, 2], [1, 1, 1], [5, 5, 4])]
        engine = FakeEngine()
        near, far = differences(engine, jobs, ours, base)
        assert engine.asked == [[7, 5], [9, 5, 5]]
        assert near["tokens"] == [1, 9] and near["gap"] == pytest.approx(0.03)
        assert far["tokens"] == [5, 4] and far["gap"] is None


def finished(tier: str, **changes: Any) -> TierRun:
    series = [{"seconds": s, "report": report(16 * s, tier)} for s in range(1, 9)]
    ours = {"counters": {"eager_calls": 1, "graph_calls": 2, "errors": {}}}
    result = {
        "complete": True,
        "churn_s": 8.0,
        "answers": [{"aborted": False, "tokens": [1], "steps": 4}],
        "timings": [{"length": 8192, "ms_per_step": 2.5}],
        "series": series,
        "ranks": [report(200, tier)],
        "differences": [],
    }
    return TierRun(tier, {**result, **changes}, [ours], None)


class TestFaults:
    def test_a_good_run_has_none(self) -> None:
        assert [faults_of(finished(tier), True, 0.1) for tier in ("off", "sort", "relocate")] == [[], [], []]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"ranks": []}, "no scheduler reported: the plug-in is not live"),
            ({"ranks": [report(9, relocations=0)]}, "rank 0 never moved anything, in 9 looks: this run proves nothing"),
            ({"ranks": [report(9, tier="sort")]}, "rank 0 runs tier sort"),
            ({"ranks": [{**report(9), "relocation": "the radix cache is disabled"}]}, "the radix cache is disabled"),
            ({"ranks": [{**report(9), "sorted_allocator": vars(SortCounters())}]}, "was never asked"),
            ({"differences": [{"gap": 0.5}, {"gap": None}, {"gap": 0.05}]}, "2 answers differ where"),
        ],
    )
    def test_what_proves_nothing_or_differs_is_one(self, changes: dict[str, Any], message: str) -> None:
        (fault,) = faults_of(finished("relocate", **changes), True, 0.1)
        assert fault.startswith("relocate: ") and message in fault

    def test_the_verify_kernel_must_have_run(self) -> None:
        run = finished("sort")
        idle = TierRun(run.tier, run.result, [{"counters": {"eager_calls": 0, "graph_calls": 0, "errors": {}}}], None)
        assert faults_of(idle, True, 0.1) == ["sort: no verify call was ours"]
        assert faults_of(idle, False, 0.1) == []

    def test_a_run_is_told(self) -> None:
        console = Console(record=True, width=140)
        near = {"request": 3, "position": 2, "tokens": [5, 6], "gap": 0.01}
        refused = finished("relocate", ranks=[report(9, refused={"a row [moved]": 2})], differences=[near])
        failed = TierRun("sort", {}, [], "the engine failed (exit -9)")
        runs = [finished("off"), failed, refused]
        print_runs(runs, [f for run in runs for f in faults_of(run, True, 0.1)], 0.1, console)
        text = console.export_text()
        assert "relocate, rank 0: refused 2 times: a row [moved]" in text
        assert "request 3, token 2: 5 or 6, log-probability gap 0.0100: near tie" in text
        assert "FAULT sort: the engine failed (exit -9)" in text and "did NOT pass" in text
        assert "4.0 (4.0)" in text and "2.500" in text

    def test_a_narrow_terminal_cuts_no_figure_off(self) -> None:
        moved = {"rows_moved": 44_051, "bytes_moved": 202_987_008, "longest_pause_ms": 48.8, "paused_ms": 2038.4}
        console = Console(record=True, width=80)
        series = [{"seconds": 8, "report": report(9, **moved)}]
        print_runs([finished("off"), finished("relocate", series=series)], [], 0.1, console)
        text = console.export_text()
        assert "\u2026" not in text and "44051" in text and "2038" in text

    def test_what_was_moved_while_steps_were_timed_is_no_cost_of_the_churn(self) -> None:
        console = Console(record=True, width=140)
        during, after = report(160, paused_ms=800.0), report(200, paused_ms=2400.0)
        series = [{"seconds": 7.9, "report": during}, {"seconds": 8.4, "report": after}]
        print_runs([finished("relocate", series=series, ranks=[after])], [], 0.1, console)
        (row,) = [line for line in console.export_text().splitlines() if "%" in line]
        assert "10.0%" in row and "800" in row and "2400" not in row


def state_of(process: int) -> str:
    """Its letter in /proc; "" where there is no such process (any more)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class TestRunner:
    def test_a_worker_gets_its_tier_and_leaves_its_result(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = "import json, os, sys; r = dict(complete=True, argv=sys.argv[1:], env=dict(os.environ)); "
        script += "open(sys.argv[3], 'w').write(json.dumps(r))"
        body = f'exec {sys.executable} -c "{script}" "$@"'
        run = self.started(body, tmp_path, monkeypatch).run("relocate", "off")
        assert run.failure is None
        env = run.result["env"]
        assert env["KDTREE_DEFRAG"] == "relocate" and env["KDTREE_VERIFY"] == "on"
        assert env["KDTREE_DEFRAG_BUDGET"] == "4M" and env["KDTREE_STATUS"] == str(tmp_path / "relocate-status")
        assert run.result["argv"][3] == str(tmp_path / "off.json")
        assert LiveSpec.from_json(run.result["argv"][0]) == spec()

    def test_a_worker_that_hangs_is_stopped_with_all_it_started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = self.started("sleep 600 & echo pid $!; wait", tmp_path, monkeypatch, 5.0).run("sort", None)
        assert run.failure is not None and "not done after 5 s, killed" in run.failure
        child = int((tmp_path / "sort.log").read_text().split()[1])
        end = time.monotonic() + 10
        while (state := state_of(child)) not in ("", "Z") and time.monotonic() < end:
            time.sleep(0.01)
        assert state in ("", "Z")

    def test_a_crash_shows_the_end_of_its_log(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = self.started("echo no memory left; exit 1", tmp_path, monkeypatch).run("off", None)
        assert run.failure is not None and "failed (exit 1)" in run.failure and "no memory left" in run.failure
        assert faults_of(run, True, 0.1) == [f"off: {run.failure}"]

    def started(self, body: str, folder: Path, monkeypatch: pytest.MonkeyPatch, timeout: float = 60.0) -> TierRunner:
        program = folder / "python"
        program.write_text(f"#!/bin/sh\nshift 2\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setattr(defrag_live_run.sys, "executable", str(program))
        return TierRunner(spec(), folder / "model", folder, defrag_live.settings_of(arguments()), timeout)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--slots", "3000"), "--slots 3000: expected at least 8"),
        (("--requests", "0"), "--requests: found 0"),
        (("--tiers", "off,off"), "each once"),
        (("--lengths", "many"), "--lengths: found 'many'"),
        (("--memory", "2"), "--memory: found 2.0"),
        (("--low", "64", "--high", "8"), "KDTREE_DEFRAG_LOW=64: expected at most"),
    ],
)
def test_bad_input_is_refused_before_an_engine_starts(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        defrag.run(arguments(*argv))
