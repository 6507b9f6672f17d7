"""Verify steps on a GPU: captured ones and a sweep of shapes, in replayed graphs and eager, ours beside the peers.

Times are GPU time between CUDA events, one call of a round over cold slot sets.
"""

from __future__ import annotations

import pytest

from captured_tensors import load_case
from captured_tensors.store import DEFAULT_CASES, iter_case_paths
from harness.bench_shapes import PRESETS, BenchShape
from tests.benchmarks.gpu_clock import calls_a_round, gpu_clock

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=gpu_clock)]

PEERS = ("sglang-triton", "flashinfer-fa2", "flashinfer-fa3", "flashmla", "torch")
SHAPES = [*PRESETS["targets"], *PRESETS["batches"][-1:]]
PATHS = sorted(iter_case_paths(DEFAULT_CASES))
POOL_SLOTS = 1_200_000
ROUNDS = 15


def shape_id(shape: BenchShape) -> str:
    return f"H{shape.H}-T{shape.T}-{shape.length_label}"


@pytest.fixture(scope="module")
def device():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device("cuda:0")


@pytest.fixture(scope="module")
def pool(device):
    from harness.bench_inputs import make_pool

    return make_pool(POOL_SLOTS // 64 * 64, device, seed=0)


def run_rounds(benchmark, stopwatch, calls: int) -> None:
    calls_a_round(calls)
    benchmark.extra_info["calls a round"] = calls
    benchmark.pedantic(stopwatch.run, rounds=ROUNDS, warmup_rounds=2)


def contender_of(name, work):
    from harness.bench_subject import NAME, Variant, prepare_subject
    from harness.peers import PEERS as KNOWN

    if name == NAME:
        return prepare_subject(work, Variant())[0]
    reason = KNOWN[name].available(work.device)
    if reason:
        pytest.skip(reason)
    return KNOWN[name].prepare(work)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("name", ["verify-numba", *PEERS])
def test_shape_in_a_graph(benchmark, pool, shape, name):
    from harness.bench_inputs import Coldness, Workload
    from harness.bench_measure import References, check_contender
    from harness.timer import GraphStopwatch

    benchmark.group = f"{shape_id(shape)}, graph"
    work = Workload(shape, pool, Coldness(), seed=0)
    contender = contender_of(name, work)
    check = check_contender(contender, References(work), 0)
    assert check.green, str(check)
    run_rounds(benchmark, GraphStopwatch(contender.calls), work.n_sets)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_captured_step(benchmark, device, path, mode):
    import torch

    from harness.case_batch import device_batch, host_batch
    from harness.devices import CudaDevice
    from harness.timer import make_stopwatch
    from verify_numba import Verifier

    benchmark.group = f"{path.stem}, {mode}"
    case = load_case(path)
    batch = device_batch(host_batch(case), CudaDevice(torch))
    N, H, _ = batch.q.shape
    verifier = Verifier(max_bs=len(case.seq_lens), T=case.meta.max_extend_len, H=H, device="cuda:0")
    verifier.warmup()
    out = torch.full((N, H, 512), torch.nan, dtype=torch.bfloat16, device=device)
    calls = [lambda: verifier.verify(batch, out)] * 20
    stopwatch = make_stopwatch(mode, calls)
    stopwatch.run()
    assert torch.isfinite(out).all()
    run_rounds(benchmark, stopwatch, len(calls))
