"""The plans that the mover is timed with, and its refusal without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from harness.defrag_mover import SLOTS, inverse, leave_copies, plans, time_mover
from harness.errors import UsageError
from sglang_glue.defrag.mover import move_on_host, pools_of_arrays


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


def test_a_plan_and_its_inverse_leave_what_is_expected() -> None:
    content = np.random.default_rng(1).integers(0, 256, (SLOTS, 16), np.uint8)
    rows = content.copy()  # one buffer for all plans, as on the GPU
    pools = pools_of_arrays([rows])
    for shape, plan in plans():
        for _ in range(2):
            move_on_host(pools, plan)
            assert np.array_equal(rows[plan.dst], content[plan.src]), shape
            move_on_host(pools, inverse(plan, SLOTS - 1))
        leave_copies(content, plan)
        assert np.array_equal(rows, content), shape


@pytest.mark.gpu
def test_timed_rows_are_right() -> None:
    timings = time_mover()
    assert [t.shape for t in timings if not t.right] == []
    assert all(t.gpu_us > 0 for t in timings)
