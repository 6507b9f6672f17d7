"""No order of the warps and no delay of a copy changes a bit, and no missing wait stays unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.cases import make_batch
from tests.lockstep.schedules import is_noticed, starving, without_wait
from tests.lockstep.support import BY_NAME, Result, run
from verify_numba.geometry import CLUSTER_FORMS, SINGLE_FORMS, Geometry
from verify_numba.lockstep import LockstepError, RaceError
from verify_numba.lockstep.machine import Block, current

CLUSTER, SINGLE = BY_NAME["cluster72"], BY_NAME["single24"]
SCORE_WARPS = range(CLUSTER.value_warps, CLUSTER.first_softmax_warp)
FORMS = pytest.mark.parametrize("g", [CLUSTER, SINGLE], ids=lambda g: g.name)
BATCH = make_batch(0, prefix=(150, 0, 0, 0, 0, 5, 50), drafts=(9, 5, 3, 4, 1, 3, 2), H=8)
"""More tiles than stages, and requests of one tile, some of them one after another, so that every ring turns over and
requests overlap; as many rows as a block takes, so that every score and softmax warp has some."""
PREFIXES = make_batch(0, prefix=(100, *(5,) * 8), drafts=(1,) * 9, H=4)
"""To be run without the tails, at each of which all score warps meet, so that they may be tiles apart."""
SEEDS = 6
WAITS = [
    ("full", "score", "copy"),
    ("empty", "copy", "value"),
    ("scores_full", "softmax", "score"),
    ("scores_empty", "score", "softmax"),
    ("weights_full", "value", "softmax"),
    ("weights_empty", "softmax", "value"),
    ("inverse_full", "value", "softmax"),
    ("inverse_empty", "softmax", "value"),
]
"""Rings of barriers, who waits there and for whom; the value warps' wait for `full` is implied by `weights_full`."""


def test_every_warp_has_rows() -> None:
    assert BATCH.T * BATCH.H >= max(CLUSTER.rows, SINGLE.rows)


@pytest.fixture(scope="module")
def clean() -> dict[Geometry, Result]:
    return {g: run(BATCH, g, workers=1) for g in (CLUSTER, SINGLE)}


@FORMS
@pytest.mark.parametrize("adversarial", [False, True])
def test_every_schedule_gives_the_same_bits(g: Geometry, adversarial: bool, clean: dict[Geometry, Result]) -> None:
    for seed in range(SEEDS):
        assert run(BATCH, g, workers=1, seed=seed, adversarial=adversarial).same_bits(clean[g]), seed


@FORMS
@pytest.mark.parametrize("late", ["copy", "score", "softmax", "value"])
def test_a_role_that_comes_last_in_one_block(g: Geometry, late: str, clean: dict[Geometry, Result]) -> None:
    """The other block goes on as far as it can, and what it sends lands at once, or as garbage until it must land."""
    for rank in range(g.cluster):
        for adversarial in (False, True):
            with starving(g, late, rank):
                found = run(BATCH, g, workers=1, seed=rank, adversarial=adversarial, check_races=True)
            assert found.same_bits(clean[g]), (rank, adversarial)


@FORMS
def test_copies_that_land_as_late_as_they_may(g: Geometry, clean: dict[Geometry, Result]) -> None:
    assert run(BATCH, g, workers=1, adversarial=True).same_bits(clean[g])


@FORMS
def test_several_workers_in_any_order(g: Geometry) -> None:
    expected = run(BATCH, g, workers=4)
    for seed in range(2):
        assert run(BATCH, g, workers=4, seed=seed, adversarial=True, check_races=True).same_bits(expected), seed


@pytest.mark.parametrize("g", (*CLUSTER_FORMS, *SINGLE_FORMS), ids=lambda g: g.name)
def test_score_warps_far_apart(g: Geometry) -> None:
    expected = run(PREFIXES, g, workers=1, parts="PREFIX", check_races=True)
    for seed in range(SEEDS):
        found = run(PREFIXES, g, workers=1, parts="PREFIX", seed=seed, adversarial=True, check_races=True)
        assert found.same_bits(expected), seed


@FORMS
@pytest.mark.parametrize(("ring", "role", "late"), WAITS, ids=[f"{role}-{ring}" for ring, role, _ in WAITS])
def test_a_missing_wait_is_noticed(g: Geometry, ring: str, role: str, late: str, clean: dict[Geometry, Result]) -> None:
    with without_wait(g, ring, role):
        assert any(
            is_noticed(BATCH, g, clean[g], late, rank, seed) for seed in range(SEEDS) for rank in range(g.cluster)
        )
        with pytest.raises(LockstepError):  # in the first order there is, whatever comes out
            run(BATCH, g, workers=1, check_races=True)


@pytest.mark.parametrize("lost", [0, -1])
def test_a_part_that_is_not_sent_is_noticed(lost: int) -> None:
    def change(ops: SimpleNamespace) -> None:
        def some(deliver: Callable[..., None]) -> Callable[..., None]:
            def deliver_some(*args: Any) -> None:
                if current().index != SCORE_WARPS[lost]:
                    deliver(*args)

            return deliver_some

        ops.deliver_even, ops.deliver_odd = some(ops.deliver_even), some(ops.deliver_odd)

    with pytest.raises(LockstepError, match=r"scores_full\[0\] .* bytes are missing"):
        run(BATCH, CLUSTER, workers=1, change=change)


@pytest.mark.parametrize("op", ["post_note", "post_weights"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_posted_is_noticed(op: str, rank: int) -> None:
    """By the partner, which counts the bytes."""

    def change(ops: SimpleNamespace) -> None:
        original = getattr(ops, op)

        def post(*args: Any) -> None:
            if current().block.x != rank:
                original(*args)

        setattr(ops, op, post)

    with pytest.raises(
        LockstepError, match=rf"weights_full\[0\] at byte \d+ of block \({1 - rank}, 0\) .* bytes are missing"
    ):
        run(BATCH, CLUSTER, workers=1, change=change)


@FORMS
def test_cleaning_values_before_all_have_scored_is_a_race(g: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    named = Block.named_barrier
    monkeypatch.setattr(Block, "named_barrier", lambda block, name, warps: named(block, str(current()), 1))
    with pytest.raises(RaceError):
        run(BATCH, g, workers=1, check_races=True)


@FORMS
def test_a_start_without_waiting_for_the_barriers_is_noticed(g: Geometry) -> None:
    def change(ops: SimpleNamespace) -> None:
        ops.await_start = ops.announce

    with pytest.raises(LockstepError):
        for seed in range(SEEDS):
            run(BATCH, g, workers=1, seed=seed, change=change)


@FORMS
def test_a_stage_that_waits_for_one_more_arrival_is_noticed(g: Geometry) -> None:
    """The barrier of a stage must count the lanes that copy."""

    def change(ops: SimpleNamespace) -> None:
        copy_rows = ops.copy_rows

        def demanding(stage: int, full: int, *rest: object) -> None:
            current().block.mbarrier(full).count += 1
            copy_rows(stage, full, *rest)

        ops.copy_rows = demanding

    with pytest.raises(LockstepError, match="no warp can run|pending"):
        run(BATCH, g, workers=1, change=change)


def test_the_same_seed_gives_the_same_run() -> None:
    orders: list[list[str]] = []
    for _ in range(2):
        order: list[str] = []

        def change(ops: SimpleNamespace, order: list[str] = order) -> None:
            arrive = ops.arrive

            def logged(bar: int) -> None:
                order.append(str(current()))
                arrive(bar)

            ops.arrive = logged

        run(BATCH, CLUSTER, workers=2, seed=5, adversarial=True, change=change)
        orders.append(order)
    assert orders[0] == orders[1]
    assert len(np.unique(orders[0])) > CLUSTER.value_warps
