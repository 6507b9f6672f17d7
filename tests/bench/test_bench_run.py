from __future__ import annotations

import json

import pytest
import torch

from harness import bench_measure, bench_run, timer
from harness.bench_inputs import Coldness, Workload, make_pool
from harness.bench_options import Settings
from harness.bench_run import BenchRun
from harness.bench_shapes import BenchShape
from harness.peers import PEERS
from harness.peers.base import PeerRefused
from harness.timer import HostStopwatch
from harness.work import Ceilings
from tests.bench.conftest import CPU

SHAPES = (BenchShape((40,), T=3, H=2), BenchShape((60, 5), T=3, H=2, run_length=0))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_run, "measure_ceilings", lambda device: Ceilings(1e9, 1e12))
    monkeypatch.setattr(bench_run, "CPU_COLD", Coldness(bytes=0, min_sets=2))
    monkeypatch.setattr(timer, "WARM_S", 0)


def make_run(shapes=SHAPES, peers=("torch",), splits=(None,), **options):
    settings = Settings(shapes=shapes, modes=("graph",), splits=splits, forms=("auto",))
    return BenchRun(settings, [PEERS[name] for name in peers], CPU, pass_seconds=0, **options)


def test_a_whole_run(subject, capsys):
    stored = []
    run = make_run(store=lambda result: stored.append(json.dumps(result)))
    assert run.run() == 0
    result = run.result
    assert result["complete"] and result["commit"]
    assert [r["lengths"] for r in result["results"]] == [[40], [60, 5]]
    assert len(json.loads(stored[-2])["results"]) == 2  # stored before the run was complete
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("H ")]
    assert len(lines) == 2
    assert "60+5" in lines[1] and "contiguous" in lines[1] and "torch" in lines[1]


def test_a_record_is_consistent_with_its_own_floors(subject):
    run = make_run()
    run.run()
    for record in run.result["results"]:
        assert record["floor_bytes_us"] == pytest.approx(record["bytes"] / 1e9 * 1e6)
        best = max(record["floor_bytes_us"], record["floor_flops_us"])
        assert record["percent_of_floor"] == pytest.approx(100 * best / record["us"])
        assert record["gbps"] == pytest.approx(record["bytes"] / record["us"] / 1e3)
        peer = record["peers"]["torch"]
        assert peer["ratio"] == pytest.approx(peer["us"] / record["us"])
        assert len(record["us_passes"]) == len(peer["us_passes"]) == 2
        assert record["timed_by"] == "host"


def test_a_missing_peer_is_named(subject, capsys):
    run = make_run(peers=("flashmla", "torch"))
    run.run()
    assert "flash_mla" in run.result["peers"]["flashmla"]["missing"]
    assert run.result["peers"]["torch"]["missing"] is None
    assert "peer flashmla: sgl_kernel.flash_mla and flash_mla cannot be imported" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed(subject, capsys):
    subject.spoil = lambda out: out[0].mul_(1.1)
    run = make_run()
    assert run.run() == 1
    for record in run.result["results"]:
        assert "us" not in record and not record["check"]["green"]
        assert record["peers"] == {}
    assert "RED, not timed" in capsys.readouterr().out


def test_wrong_on_a_later_slot_set_only_is_caught_too(subject):
    calls = []

    def spoil(out):
        calls.append(1)
        if len(calls) > 1:  # the check of the first set is the first call
            out.zero_()

    subject.spoil = spoil
    run = make_run(shapes=SHAPES[:1])
    assert run.run() == 1
    assert "us" not in run.result["results"][0]


def test_a_plan_that_refuses_is_reported(subject, capsys):
    subject.refuse = "nsplit is 7, expected at most 4"
    run = make_run(shapes=SHAPES[:1])
    assert run.run() == 1
    assert "not run: nsplit is 7, expected at most 4" in capsys.readouterr().out


class Failing:
    name = "failing"

    def __init__(self, error):
        self._error = error

    def available(self, device):
        return None

    def prepare(self, work):
        raise self._error


@pytest.mark.parametrize(
    ("error", "shown"),
    [(PeerRefused("pages only"), "pages only"), (RuntimeError("no nvcc\nmore"), "RuntimeError: no nvcc")],
)
def test_a_peer_that_fails_costs_nobody_else(subject, capsys, error, shown):
    run = make_run(shapes=SHAPES[:1])
    run.peers = [Failing(error), PEERS["torch"]]
    assert run.run() == 0
    peers = run.result["results"][0]["peers"]
    assert peers["failing"]["error"] == shown
    assert peers["torch"]["us"] > 0
    assert f"failing: {shown}" in capsys.readouterr().out


def test_a_peer_that_is_wrong_gets_no_time(subject, monkeypatch):
    peer = PEERS["torch"]

    class Wrong:
        name = "wrong"

        def available(self, device):
            return None

        def prepare(self, work):
            contender = peer.prepare(work)
            contender.calls = [lambda: contender.output.out.fill_(1.0)] * work.n_sets
            return contender

    run = make_run(shapes=SHAPES[:1])
    run.peers = [Wrong()]
    run.run()
    record = run.result["results"][0]["peers"]["wrong"]
    assert "us" not in record and "ratio" not in record and not record["check"]["green"]


def test_split_counts_are_separate_records_with_the_same_peers(subject):
    run = make_run(shapes=SHAPES[:1], splits=(None, 4, 16))
    run.run()
    records = run.result["results"]
    assert [r["nsplit"] for r in records] == [None, 4, 16]
    assert records[1]["plan"] == "plan of nsplit 4"
    assert len({r["peers"]["torch"]["us"] for r in records}) == 1


def test_a_budget_ends_the_run_in_time_and_says_what_is_left(subject, monkeypatch, capsys):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(bench_run.time, "monotonic", lambda: next(clock))
    run = make_run(shapes=SHAPES * 4, seconds=45)
    run.run()
    assert not run.result["complete"]
    assert 0 < len(run.result["results"]) < 8
    assert len(run.result["results"]) + len(run.result["not_run"]) == 8
    assert "time is up" in capsys.readouterr().out


def test_a_shape_that_fails_does_not_end_the_run(subject, monkeypatch, capsys):
    def prepare(work, variant):
        if work.shape.bs == 1:
            raise RuntimeError("out of memory")
        return subject.prepare(work, variant)

    monkeypatch.setattr("harness.bench_measure.prepare_subject", prepare)
    run = make_run()
    assert run.run() == 1
    assert run.result["complete"] and len(run.result["results"]) == 1
    assert "out of memory" in run.result["failures"][0]


def test_the_pool_holds_the_largest_shape(subject):
    run = make_run(shapes=(BenchShape((6000,), T=1, H=1),), pool_slots=100)
    run.run()
    assert run.result["pool_slots"] >= 2 * 6001


def test_our_own_kernels_on_the_cpu():
    run = make_run(shapes=(BenchShape((21, 0), T=3, H=2),), splits=(None, 2))
    assert run.run() == 0
    for record in run.result["results"]:
        assert record["check"]["green"] and record["check"]["lse"] < 1e-3
        assert record["us"] > 0 and "workers" in record["plan"]


@pytest.mark.gpu
def test_on_a_gpu_graph_and_eager_agree_with_float64(tmp_path):
    settings = Settings((BenchShape((5000, 0, 77), T=9, H=8),), ("graph", "eager"), (None, 3), ("auto",))
    run = BenchRun(settings, [PEERS["torch"]], torch.device("cuda:0"), pass_seconds=0.05)
    assert run.run() == 0
    assert [(r["timed_by"], r["nsplit"]) for r in run.result["results"]] == [
        ("graph", None),
        ("graph", 3),
        ("eager", None),
        ("eager", 3),
    ]


def test_a_peer_that_cannot_be_captured_is_timed_eager_and_says_so(subject, monkeypatch):
    def stopwatch(mode, calls):
        if mode == "graph" and len(made) == 1:  # ours is the first
            made.append(mode)
            raise RuntimeError("operation not permitted when stream is capturing")
        made.append(mode)
        return HostStopwatch(calls)

    made = []
    monkeypatch.setattr(bench_measure, "make_stopwatch", stopwatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool = make_pool(4096, CPU, seed=0)
    work = Workload(SHAPES[0], pool, Coldness(bytes=0, min_sets=2), seed=0)
    references = bench_measure.References(work)
    run = bench_measure.ShapeRun(work, references, "graph", 0.0, lambda text: None)
    _, (peer,) = run.run([bench_measure.Variant()], [PEERS["torch"]])
    assert made == ["graph", "graph", "eager"]
    assert peer.timing.mode == "eager" and "its capture failed" in peer.note
