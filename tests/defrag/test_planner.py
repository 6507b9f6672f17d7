"""The planner: within its budget, never for the worse, to an end, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_glue.defrag.layout import Layout
from sglang_glue.defrag.planner import PlannerSettings, plan_round
from sglang_glue.defrag.snapshot import Snapshot
from tests.defrag.pools import moved, scattered, snapshot_of

PLANNER = PlannerSettings(budget_bytes=64 * 100, slot_bytes=100, piece=32)


def links(snapshot: Snapshot) -> int:
    """Weighted links of a pool, as the planner counts them."""
    layout = Layout(snapshot)
    with_next = np.flatnonzero(layout.succ)
    joined = layout.succ[with_next] == with_next + 1
    return int(layout.weight[with_next][joined].sum())


def after(snapshot: Snapshot, planner: PlannerSettings = PLANNER) -> tuple[Snapshot, int]:
    plan = plan_round(snapshot, planner)
    return moved(snapshot, plan.lookup(snapshot.size), plan.free_after(snapshot.free)), len(plan)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 1.0), st.integers(2, 400))
def test_a_round_is_valid_within_budget_and_gains(seed: int, fill: float, budget: int) -> None:
    before = scattered(seed, fill=fill)
    planner = PlannerSettings(budget_bytes=budget * 100, slot_bytes=100, piece=32)
    result, rows = after(before, planner)
    result.check()
    assert rows <= budget
    assert links(result) > links(before) or rows == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fill", [0.5, 0.9, 1.0])
def test_rounds_on_a_still_pool_come_to_an_end(seed: int, fill: float) -> None:
    state, rounds = scattered(seed, fill=fill), 0
    start = state.mean_run
    while True:
        state, rows = after(state)
        if rows == 0:
            break
        rounds += 1
        assert rounds < 500
    assert rounds > 0
    assert state.mean_run > 4 * start, "even a full pool is put in order, by cycles"


def test_a_full_pool_is_ordered_by_cycles() -> None:
    rng = np.random.default_rng(1)
    state = snapshot_of(256, *np.split(rng.permutation(256) + 1, 8))
    assert state.free.size == 0
    plan = plan_round(state, PLANNER)
    assert plan.cyclic.all() and len(plan) > 0


def test_equal_snapshots_give_equal_plans() -> None:
    """Every tensor-parallel rank plans for itself."""
    digests = {plan_round(scattered(7), PLANNER).digest() for _ in range(3)}
    assert len(digests) == 1
    shuffled = scattered(7)
    shuffled = Snapshot(shuffled.size, shuffled.free[::-1].copy(), shuffled.units, shuffled.rows)
    assert {plan_round(shuffled, PLANNER).digest()} == digests, "the order of the free list must not matter"


def test_nothing_is_moved_for_nothing() -> None:
    assert len(plan_round(snapshot_of(64, list(range(1, 33)), list(range(40, 60))), PLANNER)) == 0
    assert len(plan_round(snapshot_of(64, [1, 3, 5, 7], readers=0), PLANNER)) == 0, "nobody reads it"


def test_a_scattered_request_goes_into_the_tightest_hole() -> None:
    held = [s for s in range(1, 65) if s not in (*range(10, 15), *range(30, 34))]
    rest = [s for s in held if s not in (50, 2, 61, 7)]
    state = snapshot_of(64, [50, 2, 61, 7], rest)
    plan = plan_round(state, PlannerSettings(budget_bytes=400, slot_bytes=100, piece=32))
    table = plan.lookup(64)
    assert table[[50, 2, 61, 7]].tolist() == [30, 31, 32, 33]


def test_a_stretch_follows_the_one_before_it() -> None:
    """A decoding request's new slots go behind its prefix where there is room."""
    from sglang_glue.defrag.snapshot import Unit

    prefix, tail = np.arange(1, 11), np.array([40, 50, 60])
    units = (Unit(prefix, 1, -1, "prefix"), Unit(tail, 1, 0, "tail"))
    free = np.setdiff1d(np.arange(1, 65), np.concatenate((prefix, tail)))
    state = Snapshot(64, free, units, (np.concatenate((prefix, tail)),))
    assert plan_round(state, PLANNER).lookup(64)[tail].tolist() == [11, 12, 13]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 380), st.integers(0, 5))
def test_an_effect_is_what_applying_it_does(seed: int, at: int, which: int) -> None:
    state = scattered(seed)
    layout = Layout(state)
    unit = state.units[which % len(state.units)].slots[:20]
    effect = layout.effect(unit, min(at, state.size - unit.size + 1))
    before = links(state)
    layout.apply(effect)
    src, dst = layout.moves()
    assert src.size == effect.rows
    table = np.arange(state.size + 1)
    table[src] = dst
    free = np.setdiff1d(np.arange(1, state.size + 1), np.concatenate([table[u.slots] for u in state.units]))
    result = moved(state, table, free)
    result.check()
    assert links(result) - before == effect.gain


@pytest.mark.parametrize(
    ("field", "value"), [("slot_bytes", 0), ("budget_bytes", 10), ("piece", 1), ("low", 0.5), ("high", 2.0)]
)
def test_bad_settings_are_named(field: str, value: float) -> None:
    good = {"budget_bytes": 1000, "slot_bytes": 100, "piece": 8, "low": 4.0, "high": 8.0}
    with pytest.raises(ValueError, match=field):
        PlannerSettings(**{**good, field: value})  # type: ignore[arg-type]
