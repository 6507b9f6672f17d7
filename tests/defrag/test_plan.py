"""Plans: any partial permutation in an order that loses nothing; anything else is refused (kind 25)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_glue.defrag.plan import PlanError, make_plan


def build(moves: list[tuple[int, int]], free: list[int], size: int = 30):  # type: ignore[no-untyped-def]
    src, dst = np.array(moves, np.int64).reshape(-1, 2).T
    return make_plan(src, dst, np.array(free, np.int64), size)


def test_a_chain_is_walked_from_its_free_end() -> None:
    plan = build([(3, 9), (9, 12), (12, 5)], [5])
    assert plan.path.tolist() == [5, 12, 9, 3]
    assert plan.start.tolist() == [0, 4] and plan.cyclic.tolist() == [False]


def test_a_cycle_is_one_path() -> None:
    plan = build([(3, 9), (9, 12), (12, 3)], [])
    assert plan.cyclic.tolist() == [True]
    assert sorted(plan.path.tolist()) == [3, 9, 12]
    for here, there in zip(plan.path, np.roll(plan.path, -1), strict=True):
        assert (int(there), int(here)) in {(3, 9), (9, 12), (12, 3)}


def test_moves_that_stay_are_dropped() -> None:
    assert len(build([(3, 3), (4, 4)], [])) == 0


@pytest.mark.parametrize(
    ("moves", "free", "message"),
    [
        ([(3, 9)], [], "destination slot 9 is in use and does not move away"),
        ([(3, 9)], [3, 9], "source slot 3 is free"),
        ([(3, 9), (3, 10)], [9, 10], "source slot 3 is named twice"),
        ([(3, 9), (4, 9)], [9], "destination slot 9 is named twice"),
        ([(0, 9)], [9], r"source slot 0 lies outside 1\.\.30"),
        ([(3, 31)], [], r"destination slot 31 lies outside 1\.\.30"),
    ],
)
def test_what_is_no_relocation_is_refused(
    moves: list[tuple[int, int]], free: list[int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        build(moves, free)


def test_the_free_set_afterwards() -> None:
    plan = build([(3, 9), (9, 12), (20, 5)], [5, 12, 14])
    assert plan.free_after(np.array([14, 5, 12])).tolist() == [3, 14, 20]
    assert plan.lookup(30)[[3, 9, 20, 7]].tolist() == [9, 12, 5, 7]


@given(st.permutations(range(1, 31)), st.integers(0, 30), st.integers(0, 1000))
def test_replaying_the_path_serially_is_the_permutation(order: list[int], used: int, seed: int) -> None:
    held = np.array(order[:used], np.int64)
    free = np.array(order[used:], np.int64)
    target = np.random.default_rng(seed).permutation(30)[:used] + 1
    moving = held != target
    blocked = ~(np.isin(target, held[moving]) | np.isin(target, free))
    src, dst = held[moving & ~blocked], target[moving & ~blocked]
    blocked_again = ~(np.isin(dst, src) | np.isin(dst, free))
    assume(not blocked_again.any())
    plan = make_plan(src, dst, free, 30)
    pool = np.arange(31) * 7
    want = pool.copy()
    want[dst] = pool[src]
    for chain in range(plan.chains):
        path = plan.path[plan.start[chain] : plan.start[chain + 1]]
        saved = pool[path[0]]
        for here, there in pairwise(path.tolist()):
            pool[here] = pool[there]
        if plan.cyclic[chain]:
            pool[path[-1]] = saved
    assert np.array_equal(pool[dst], want[dst])
    assert int(plan.cyclic.sum()) + plan.path.size - plan.chains == len(plan), "one copy a move"
