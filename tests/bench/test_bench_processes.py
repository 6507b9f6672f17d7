"""Contenders in processes of their own: what one of them does costs nobody else."""

from __future__ import annotations

import pytest

from harness import bench_run
from harness.bench_contestant import Contestant, Failed, Limits
from harness.bench_inputs import Coldness
from harness.bench_link import Lost, ProcessLink
from harness.bench_options import Settings
from harness.bench_run import BenchRun
from harness.bench_shapes import BenchShape
from harness.bench_subject import Variant
from harness.bench_worker import Config
from harness.work import Ceilings
from tests.bench.conftest import CPU

FOREIGN = "tests.bench.foreign_peers"
FIRST, SECOND = BenchShape((40,), T=3, H=2), BenchShape((60, 5), T=3, H=2)
VARIANT = Variant().as_json()


def config_of(name):
    return Config(name, "cpu", seed=0, pool_slots=2048, cold_bytes=0, min_sets=2).as_json()


def test_one_that_dies_costs_nobody_else(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_run, "measure_ceilings", lambda device: Ceilings(1e9, 1e12))
    monkeypatch.setattr(bench_run, "CPU_COLD", Coldness(bytes=0, min_sets=2))
    settings = Settings((FIRST, SECOND), ("graph",), (None,), ("auto",))
    name = f"{FOREIGN}:Dies"
    run = BenchRun(settings, [name, "torch"], CPU, pass_seconds=0, log_dir=tmp_path)
    assert run.run() == 0 and run.result["complete"]
    first, second = (record["peers"] for record in run.result["results"])
    assert "its process ended in warm with SIGKILL; its last line: illegal address" in first[name]["error"]
    assert second[name]["us"] > 0 and first["torch"]["us"] > 0 and second["torch"]["us"] > 0
    assert all(len(record["us_passes"]) == 4 for record in run.result["results"])
    captured = capsys.readouterr()
    assert f"{name}: its process ended in warm with SIGKILL" in captured.out
    assert f"{name} | illegal address somewhere" in captured.err
    assert "illegal address" in (tmp_path / "tests.bench.foreign_peers.Dies.log").read_text()


def test_one_that_hangs_is_ended():
    name, links, said = f"{FOREIGN}:Hangs", [], []

    def connect():
        links.append(ProcessLink(config_of(name)))
        return links[-1]

    contestant = Contestant(name, connect, Limits(step=0.3), said.append)
    contestant.start()
    assert contestant.missing() is None
    with pytest.raises(Failed, match=r"no answer to open in 0\.3 s, killed"):
        contestant.open(FIRST.as_json(), "host", VARIANT, 0)
    assert links[0]._process.poll() is not None
    with pytest.raises(Failed, match="no answer to open"):  # known, so that nobody waits for it again
        contestant.open(FIRST.as_json(), "host", VARIANT, 0)
    assert len(links) == 1 and f"{name}: process lost" in said[0]


class Losing:
    """A line whose process is lost at everything but hello, or answers with `reply`."""

    started = 0

    def __init__(self, reply=None):
        Losing.started += 1
        self._reply = reply

    def begin(self, request):
        self._do = request["do"]

    def finish(self, limit):
        if self._do == "hello":
            return {"missing": None}
        if self._reply is None:
            raise Lost("gone")
        return self._reply

    def stop(self):
        pass

    def tail(self):
        return []


def started(reply=None):
    Losing.started = 0
    contestant = Contestant("peer", lambda: Losing(reply), Limits(), lambda text: None)
    contestant.start()
    assert contestant.missing() is None
    return contestant


def test_a_contender_that_is_lost_again_and_again_is_given_up():
    contestant = started()
    texts = []
    for L in (1, 1, 2, 3, 4):
        with pytest.raises(Failed) as failure:
            contestant.open(BenchShape((L,), 1, 1).as_json(), "host", VARIANT, 0)
        texts.append(str(failure.value))
    assert texts == ["gone"] * 3 + ["given up after 2 losses in a row; the last: gone"] * 2
    assert Losing.started == 2


def test_an_error_that_leaves_the_gpu_usable_keeps_the_process():
    contestant = started({"error": "RuntimeError: no nvcc", "broken": False})
    for _ in range(3):
        with pytest.raises(Failed, match="no nvcc"):
            contestant.open(FIRST.as_json(), "host", VARIANT, 0)
    assert Losing.started == 1


def test_an_error_that_breaks_the_gpu_ends_the_process_but_not_the_contender():
    contestant = started({"error": "AcceleratorError: illegal address", "broken": True})
    with pytest.raises(Failed, match="illegal address"):
        contestant.open(FIRST.as_json(), "host", VARIANT, 0)
    with pytest.raises(Failed, match="its process is gone"):
        contestant.time(SECOND.as_json(), 0, 0.1)
    with pytest.raises(Failed, match="illegal address"):
        contestant.open(SECOND.as_json(), "host", VARIANT, 0)
    assert Losing.started == 2
