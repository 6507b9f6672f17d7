"""Counter files, the reporting thread, the metrics and the line on exit."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

from sglang_glue import status as status_module
from sglang_glue.reporter import Reporter
from sglang_glue.settings import Mode
from sglang_glue.status import RUN_VARIABLE, StatusFile, read_statuses
from sglang_glue.summary import describe, summary_lines
from tests.glue.fakes import FakeVerifier, make_call
from tests.glue.slots import make_slot


@pytest.fixture(autouse=True)
def own_run(monkeypatch):
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    yield
    os.environ.pop(RUN_VARIABLE, None)


def report_of(slot, **more):
    return {
        "rank": "tp0",
        "mode": slot.mode.value,
        "plan": "fake plan",
        "counters": slot.counters.snapshot(),
        **more,
    }


def test_a_file_is_read_back_with_its_process_alive(tmp_path):
    file = StatusFile(tmp_path, {"mode": "on"})
    file.update({"backends": [1]})
    (found,) = read_statuses(tmp_path)
    assert found.pid == os.getpid() and found.alive
    assert found.content["mode"] == "on" and found.content["backends"] == [1]
    assert [path.suffix for path in file.run_folder.iterdir()] == [".json"]


def test_spawned_processes_join_the_run_and_are_seen_dead(tmp_path):
    StatusFile(tmp_path, {})
    imports = "from pathlib import Path; from sglang_glue.status import StatusFile"
    code = f"{imports}; StatusFile(Path({str(tmp_path)!r}), {{}})"
    child = subprocess.Popen([sys.executable, "-c", code])
    child.wait()
    found = {s.pid: s for s in read_statuses(tmp_path)}
    assert set(found) == {os.getpid(), child.pid}
    assert not found[child.pid].alive and found[child.pid].run == found[os.getpid()].run


def test_a_pid_used_again_is_not_taken_for_the_old_process(tmp_path):
    file = StatusFile(tmp_path, {})
    file.update({"started": 1})
    assert [s.alive for s in read_statuses(tmp_path)] == [False]


def test_half_and_foreign_files_are_skipped(tmp_path):
    folder = StatusFile(tmp_path, {}).run_folder
    (folder / "7.json").write_text('{"pid": ')
    (folder / "8.json").write_text("[]")
    assert [s.pid for s in read_statuses(tmp_path)] == [os.getpid()]


def test_old_finished_runs_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(status_module, "KEPT_RUNS", 2)
    for run in range(5):
        folder = tmp_path / f"{run}-0"
        folder.mkdir()
        (folder / "999999999.json").write_text(json.dumps({"pid": 999999999, "started": 0}))
        os.utime(folder, (run, run))
    own = StatusFile(tmp_path, {}).run_folder.name
    assert {path.name for path in tmp_path.iterdir()} == {"3-0", "4-0", own}


def test_an_unwritable_folder_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        StatusFile(tmp_path / "file", {})


def test_the_thread_follows_the_counters(tmp_path):
    call = make_call()
    slot = make_slot(Mode.ON, calls=[call])
    reporter = Reporter(StatusFile(tmp_path, {}), None, period_s=0.02)
    reporter.add(lambda: report_of(slot))
    slot(*call)
    deadline = time.monotonic() + 10
    while next(read_statuses(tmp_path)).content["backends"][0]["counters"]["eager_calls"] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    reporter.close()


def test_a_failing_report_is_logged_once_and_not_raised(tmp_path, caplog):
    reporter = Reporter(StatusFile(tmp_path, {}), None, period_s=60)

    def broken():
        raise OSError("disk full")

    reporter.add(broken)
    reporter.report()
    reporter.close()
    assert sum("cannot be reported" in r.message for r in caplog.records) == 1


METRICS = """
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess
    from sglang_glue.metrics import Metrics, metrics_enabled
    from sglang_glue.settings import Mode
    from tests.glue.fakes import FakeVerifier, make_call
    from tests.glue.slots import make_slot
    from tests.glue.test_status import report_of

    assert metrics_enabled()
    call = make_call()
    slot = make_slot(Mode.VALIDATE, calls=[call], verifier=FakeVerifier(offset=1.0))
    metrics = Metrics()
    for _ in range(3):
        slot(*call)
        slot(*call._replace(sinks=call.q))
        metrics.update([report_of(slot), {"rank": "tp0", "mode": "validate", "declined": "not_mla"}])
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


def test_metrics_join_the_multiprocess_registry(tmp_path):
    pytest.importorskip("prometheus_client")
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    code = textwrap.dedent(METRICS)
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()

    def value(name, *labels):
        (line,) = [x for x in lines if x.startswith(f"verify_numba:{name}{{") and all(part in x for part in labels)]
        return float(line.rpartition(" ")[2])

    assert value("calls_total", 'tag="eager"', 'rank="tp0"', 'mode="validate"') == 3
    assert value("declines_total", 'reason="sinks"') == 3
    assert value("mismatches_total", 'tag="eager"') == 3
    assert value("max_abs_difference", 'tag="eager"') == pytest.approx(1.0, rel=0.01)
    assert value("plan", 'plan="fake plan"') == 1


def test_one_line_a_backend_on_exit(tmp_path):
    call = make_call()
    slot = make_slot(Mode.VALIDATE, calls=[call], verifier=FakeVerifier(offset=1.0))
    slot(*call)
    slot(*call._replace(sinks=call.q))
    StatusFile(tmp_path, {"backends": [report_of(slot, capture={"written": 2})]})
    (line,) = summary_lines(tmp_path)
    for part in ("tp0 validate", "1 eager and 0 graph calls ours", "eager sinks 1", "1 mismatches", "layer 10",
                 "prefix", "graph: nothing compared", "captured written 2"):  # fmt: skip
        assert part in line


def test_a_backend_that_was_not_taken_says_why():
    assert describe({"rank": "tp1", "mode": "on", "declined": "page_size"}) == (
        "tp1 on: not installed (page_size); Triton serves everything"
    )


def test_the_line_of_validate_says_that_nothing_was_compared_yet():
    call = make_call(lengths=(1,))
    call.kv_indices[0] = 0  # a warm-up call: padding alone
    slot = make_slot(Mode.VALIDATE, calls=[call])
    assert slot(*call)
    line = describe(report_of(slot))
    assert "1 eager and 0 graph calls ours; declined none; errors none; nothing compared yet;" in line
