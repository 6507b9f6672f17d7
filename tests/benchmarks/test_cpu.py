"""What the host does for a verify step, and the oracle: runs everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from captured_tensors import load_case
from captured_tensors.store import DEFAULT_CASES, iter_case_paths
from harness.case_batch import host_batch
from oracle import verify_batch
from verify_numba import Verifier, VerifyBatch, make_plan
from verify_numba.binding import Binder
from verify_numba.validate import check_values

PATHS = sorted(iter_case_paths(DEFAULT_CASES))
SMALLEST = min(PATHS, key=lambda path: path.stat().st_size)
SIZES = [(1, 9, 8), (8, 9, 8), (32, 64, 128)]


def buffers(batch: VerifyBatch) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    N, H, _ = batch.q.shape
    return np.empty((N, H, 512), bfloat16), np.empty((N, H), np.float32)


def sizes(batch: VerifyBatch) -> dict[str, int]:
    return {
        "max_bs": len(batch.qo_indptr) - 1,
        "T": int(np.diff(batch.qo_indptr).max()),
        "H": batch.q.shape[1],
    }


@pytest.mark.benchmark(group="plan")
@pytest.mark.parametrize(("bs", "T", "H"), SIZES)
def test_plan(benchmark, bs, T, H):
    plan = benchmark(make_plan, max_bs=bs, T=T, H=H, cc=(9, 0), sm_count=132)
    assert plan.workspace_bytes > 0


@pytest.mark.benchmark(group="marshaling: checks and addresses of a batch")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_bind(benchmark, path):
    batch = host_batch(load_case(path))
    out, lse = buffers(batch)
    form, _, _ = benchmark(Binder(**sizes(batch), device=-1).bind, batch, out, lse)
    assert form.N == batch.q.shape[0]


@pytest.mark.benchmark(group="marshaling: contents of a batch")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_check_values(benchmark, path):
    benchmark(check_values, host_batch(load_case(path)))


@pytest.mark.benchmark(group="load a captured step")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_load(benchmark, path):
    assert benchmark(load_case, path).q.size


@pytest.mark.benchmark(group="oracle, float64")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_oracle(benchmark, path):
    out, _ = benchmark.pedantic(verify_batch, args=(host_batch(load_case(path)),), rounds=3, warmup_rounds=1)
    assert np.isfinite(out).all()


@pytest.mark.benchmark(group="kernels in lockstep on the CPU")
def test_kernels_on_the_cpu(benchmark):
    batch = host_batch(load_case(SMALLEST))
    out, lse = buffers(batch)
    verifier = Verifier(**sizes(batch), device="cpu")
    benchmark.pedantic(verifier.verify, args=(batch, out, lse), rounds=2)
    assert np.isfinite(out.astype(np.float32)).all()
