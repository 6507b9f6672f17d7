from __future__ import annotations

import json

import pytest
import torch

from harness import bench_measure, bench_run
from harness.bench_inputs import Coldness, Workload, make_pool
from harness.bench_options import Settings
from harness.bench_run import BenchRun
from harness.bench_shapes import BenchShape
from harness.peers import PEERS
from harness.timer import HostStopwatch
from harness.work import Ceilings
from tests.bench.conftest import CPU, local_workers

FOREIGN = "tests.bench.foreign_peers"
SHAPES = (BenchShape((40,), T=3, H=2), BenchShape((60, 5), T=3, H=2, run_length=0))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_run, "measure_ceilings", lambda device: Ceilings(1e9, 1e12))
    monkeypatch.setattr(bench_run, "CPU_COLD", Coldness(bytes=0, min_sets=2))


def make_run(shapes=SHAPES, peers=("torch",), splits=(None,), **options):
    settings = Settings(shapes=shapes, modes=("graph",), splits=splits, forms=("auto",))
    return BenchRun(settings, peers, CPU, pass_seconds=0, **options)


def test_a_whole_run(subject, capsys):
    stored = []
    run = make_run(store=lambda result: stored.append(json.dumps(result)))
    assert run.run() == 0
    result = run.result
    assert result["complete"] and result["commit"]
    assert [r["lengths"] for r in result["results"]] == [[40], [60, 5]]
    counts = [len(json.loads(text)["results"]) for text in stored]
    assert counts == sorted(counts) and {0, 1, 2} == set(counts)
    assert any(r["results"] and not r["results"][0]["peers"] for r in map(json.loads, stored)), "ours, before the peer"
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
        assert len(record["us_passes"]) == 3 and len(peer["us_passes"]) == 2  # ours before, between, and after
        assert record["timed_by"] == "host"


def test_a_missing_peer_is_named(subject, capsys):
    run = make_run(peers=("flashmla", "torch"))
    run.run()
    assert "flash_mla" in run.result["peers"]["flashmla"]["missing"]
    assert run.result["peers"]["torch"]["missing"] is None
    assert "peer flashmla: sgl_kernel.flash_mla and flash_mla cannot be imported" in capsys.readouterr().err


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
        if len(calls) > 2:  # the first call warms up, the second is the check of the first set
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


@pytest.mark.parametrize(
    ("peer", "shown"),
    [
        ("Refuses", "pages only"),
        ("Raises", "RuntimeError: no nvcc"),
        ("Absent", None),
        ("Wrong", None),
    ],
)
def test_a_peer_that_fails_costs_nobody_else(subject, capsys, peer, shown):
    name = f"{FOREIGN}:{peer}"
    run = make_run(shapes=SHAPES[:1], peers=(name, "torch"))
    assert run.run() == 0
    peers = run.result["results"][0]["peers"]
    assert peers["torch"]["us"] > 0
    if peer == "Absent":
        assert run.result["peers"][name]["missing"] == "not for this machine" and name not in peers
        return
    assert peers[name].get("error") == shown
    assert "us" not in peers[name] and "ratio" not in peers[name]
    assert f"{name}: {shown or 'wrong, not timed (relative norm'}" in capsys.readouterr().out


def test_split_counts_are_separate_records_with_the_same_peers(subject):
    run = make_run(shapes=SHAPES[:1], splits=(None, 4, 16))
    run.run()
    records = run.result["results"]
    assert [r["nsplit"] for r in records] == [None, 4, 16]
    assert records[1]["plan"] == "plan of nsplit 4"
    assert len({r["peers"]["torch"]["us"] for r in records}) == 1


def test_a_budget_ends_the_run_in_time_and_says_what_is_left(subject, monkeypatch, capsys):
    clock = iter(range(0, 1000, 10))
    run = make_run(shapes=SHAPES * 4, peers=(), seconds=45)
    monkeypatch.setattr(bench_run.time, "monotonic", lambda: next(clock))
    run.run()
    assert not run.result["complete"]
    assert 0 < len(run.result["results"]) < 8
    assert len(run.result["results"]) + len(run.result["not_run"]) == 8
    assert "time is up" in capsys.readouterr().err


def test_a_shape_that_fails_does_not_end_the_run(subject, monkeypatch, capsys):
    def prepare(work, variant):
        if work.shape.bs == 1:
            raise RuntimeError("out of memory")
        return subject.prepare(work, variant)

    monkeypatch.setattr("harness.bench_worker.prepare_subject", prepare)
    run = make_run()
    assert run.run() == 1
    assert run.result["complete"]
    failed, measured = run.result["results"]
    assert failed["error"] == "RuntimeError: out of memory" and "us" not in failed
    assert measured["us"] > 0


def test_the_pool_holds_the_largest_shape(subject):
    run = make_run(shapes=(BenchShape((6000,), T=1, H=1),), pool_slots=100)
    run.run()
    assert run.result["pool_slots"] >= 2 * 6001


def test_our_own_kernels_on_the_cpu(monkeypatch):
    local_workers(monkeypatch)
    run = make_run(shapes=(BenchShape((21, 0), T=3, H=2),), splits=(None, 2))
    assert run.run() == 0
    for record in run.result["results"]:
        assert record["check"]["green"] and record["check"]["lse"] < 1e-3
        assert record["us"] > 0 and "workers" in record["plan"]


@pytest.mark.gpu
def test_on_a_gpu_graph_and_eager_agree_with_float64(tmp_path):
    settings = Settings((BenchShape((5000, 0, 77), T=9, H=8),), ("graph", "eager"), (None, 3), ("auto",))
    run = BenchRun(settings, ["torch"], torch.device("cuda:0"), pass_seconds=0.05)
    assert run.run() == 0
    assert [(r["timed_by"], r["nsplit"]) for r in run.result["results"]] == [
        ("graph", None),
        ("graph", 3),
        ("eager", None),
        ("eager", 3),
    ]


def test_a_peer_that_cannot_be_captured_is_timed_eager_and_says_so(monkeypatch):
    def stopwatch(mode, calls):
        made.append(mode)
        if mode == "graph":
            raise RuntimeError("operation not permitted when stream is capturing")
        return HostStopwatch(calls)

    made = []
    monkeypatch.setattr(bench_measure, "make_stopwatch", stopwatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool = make_pool(4096, CPU, seed=0)
    work = Workload(SHAPES[0], pool, Coldness(bytes=0, min_sets=2), seed=0)
    contender = PEERS["torch"].prepare(work)
    opened = bench_measure.open_contender(contender, bench_measure.References(work), "graph")
    assert made == ["graph", "eager"]
    assert opened.stopwatch is not None and "eager, since its capture failed (operation not" in opened.note
