"""When relocation runs: intervals, hysteresis, and a wait that grows while it does not pay."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_glue.defrag.controller import LONGEST_WAIT, Controller
from sglang_glue.defrag.planner import PlannerSettings
from tests.defrag.pools import scattered, snapshot_of

PLANNER = PlannerSettings(budget_bytes=6400, slot_bytes=100, piece=32, low=4.0, high=16.0)


def test_hysteresis() -> None:
    controller = Controller(PLANNER, 10)
    assert not controller.wants(4.0), "not below low"
    assert controller.wants(3.9)
    assert controller.wants(15.9), "goes on above low until high is reached"
    assert not controller.wants(16.0)
    assert not controller.wants(8.0), "and does not begin again before low"
    assert not controller.wants(0.0), "nothing is live"


def test_looks_come_every_interval() -> None:
    controller = Controller(PLANNER, 10)
    contiguous = snapshot_of(64, list(range(1, 40)))
    looks = []
    for step in range(1, 45):
        if controller.due(step):
            looks.append(step)
            assert controller.decide(step, contiguous) is None
    assert looks == [10, 20, 30, 40]


def test_a_scattered_pool_is_worked_on_until_it_is_good() -> None:
    controller = Controller(PLANNER, 1)
    plan = controller.decide(1, scattered(1))
    assert plan is not None and len(plan) <= 64
    assert controller.due(2)


def test_fruitless_rounds_become_rare() -> None:
    """One reader of two interleaved lists that only the unread one's owner could make room for."""
    stuck = snapshot_of(4, [1, 3], [2, 4])
    hopeless = PlannerSettings(budget_bytes=200, slot_bytes=100, piece=2, low=4.0, high=4.0)
    controller = Controller(hopeless, 1)
    rounds, step = [], 0
    while len(rounds) < 10 and step < 10_000:
        step += 1
        if controller.due(step):
            assert controller.decide(step, _unmovable(stuck)) is None
            rounds.append(step)
    gaps = np.diff(rounds)
    assert (np.diff(gaps) >= 0).all() and gaps[-1] == LONGEST_WAIT
    assert controller.fruitless == controller.rounds


def _unmovable(snapshot):  # type: ignore[no-untyped-def]
    from sglang_glue.defrag.snapshot import Snapshot, Unit

    units = tuple(Unit(u.slots, 0, -1, u.name) for u in snapshot.units)
    return Snapshot(snapshot.size, snapshot.free, units, snapshot.rows)


def test_an_interval_is_a_step_at_least() -> None:
    with pytest.raises(ValueError, match="interval: found 0"):
        Controller(PLANNER, 0)
