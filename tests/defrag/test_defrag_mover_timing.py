"""The plans that the mover is timed with, and its refusal without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from harness.defrag_mover import plans, time_mover
from harness.errors import UsageError


def test_the_plans_are_what_they_are_called() -> None:
    shapes = {f"{shape} {len(plan)}": plan for shape, plan in plans()}
    assert [s for s in shapes if s.startswith("to free")] == [f"to free slots {n}" for n in (256, 1024, 4096)]
    assert shapes["slide by one 256"].chains == 1
    cycles = shapes["cycles of 8 1024"]
    assert cycles.cyclic.all() and (np.diff(cycles.start) == 8).all()


def test_it_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--mover: needs an NVIDIA GPU"):
        time_mover()


@pytest.mark.gpu
def test_timed_rows_are_right() -> None:
    assert all(t.right and t.gpu_us > 0 for t in time_mover())
