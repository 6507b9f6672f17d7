from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness import bench_measure
from harness.bench_inputs import Coldness, Workload, make_pool
from harness.bench_shapes import BenchShape
from harness.peers.base import Contender
from harness.peers.torch_dense import TorchDense

CPU = torch.device("cpu")


def small_work(
    lengths: tuple[int, ...] = (70, 0, 33), T: int = 4, H: int = 3, run_length: int = 1
) -> Workload:
    pool = make_pool(4096, CPU, seed=5)
    shape = BenchShape(lengths, T, H, run_length)
    return Workload(shape, pool, Coldness(bytes=0, min_sets=2), seed=5)


class Exact:
    """Stands in for our kernels: the float64 reference itself, rounded to bf16. `spoil` makes it wrong."""

    def __init__(self) -> None:
        self.spoil: Callable[[torch.Tensor], None] = lambda out: None
        self.refuse = ""

    def prepare(self, work: Workload, variant: bench_measure.Variant) -> tuple[Contender, str]:
        if self.refuse:
            raise ValueError(self.refuse)
        contender = TorchDense().prepare(work)
        contender.name = bench_measure.SUBJECT
        contender.calls = [self._call(work, index, contender) for index in range(work.n_sets)]
        return contender, f"plan of {variant}"

    def _call(self, work: Workload, index: int, contender: Contender) -> Callable[[], None]:
        exact = bench_measure.References(work).get(index, "tree", own_pages=False).out.bfloat16()

        def call() -> None:
            assert contender.output.out is not None
            contender.output.out.copy_(exact)
            self.spoil(contender.output.out)

        return call


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Exact:
    exact = Exact()
    monkeypatch.setattr(bench_measure, "prepare_subject", exact.prepare)
    return exact
