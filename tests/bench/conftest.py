from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness import bench_worker, timer
from harness.bench_inputs import Coldness, Workload, make_pool
from harness.bench_link import Message
from harness.bench_measure import References
from harness.bench_shapes import BenchShape
from harness.bench_subject import NAME as SUBJECT
from harness.bench_subject import Variant
from harness.bench_worker import Config, Worker
from harness.peers.base import Contender
from harness.peers.torch_dense import TorchDense

CPU = torch.device("cpu")


def small_work(
    lengths: tuple[int, ...] = (70, 0, 33), T: int = 4, H: int = 3, run_length: int = 1
) -> Workload:
    pool = make_pool(4096, CPU, seed=5)
    shape = BenchShape(lengths, T, H, run_length)
    return Workload(shape, pool, Coldness(bytes=0, min_sets=2), seed=5)


class LocalLink:
    """A worker in this process, so that a test can put something in the place of our kernels."""

    def __init__(self, config: Message, log: Path | None = None) -> None:
        self._worker = Worker(Config(**json.loads(json.dumps(config))))
        self._request: Message = {}

    def begin(self, request: Message) -> None:
        self._request = json.loads(json.dumps(request))

    def finish(self, limit: float) -> Message:
        reply: Message = json.loads(json.dumps(self._worker.answer(self._request)))
        return reply

    def stop(self) -> None:
        pass

    def tail(self) -> list[str]:
        return []


class Exact:
    """Stands in for our kernels: the float64 reference itself, rounded to bf16. `spoil` makes it wrong."""

    def __init__(self) -> None:
        self.spoil: Callable[[torch.Tensor], None] = lambda out: None
        self.refuse = ""

    def prepare(self, work: Workload, variant: Variant) -> tuple[Contender, str]:
        if self.refuse:
            raise ValueError(self.refuse)
        contender = TorchDense().prepare(work)
        contender.name = SUBJECT
        contender.calls = [self._call(work, index, contender) for index in range(work.n_sets)]
        return contender, f"plan of {variant}"

    def _call(self, work: Workload, index: int, contender: Contender) -> Callable[[], None]:
        exact = References(work).get(index, "tree", own_pages=False).out.bfloat16()

        def call() -> None:
            assert contender.output.out is not None
            contender.output.out.copy_(exact)
            self.spoil(contender.output.out)

        return call


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Exact:
    """`Exact` for our kernels, in workers in this process."""
    exact = Exact()
    monkeypatch.setattr(bench_worker, "prepare_subject", exact.prepare)
    local_workers(monkeypatch)
    return exact


def local_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.bench_run.ProcessLink", LocalLink)
    monkeypatch.setattr(timer, "WARM_S", 0)
