"""No order of the warps and no delay of a copy changes a bit, and no missing wait stays unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.cases import make_batch
from tests.lockstep.support import BY_NAME, Array, Result, run
from verify_numba.geometry import CLUSTER_FORMS, SINGLE_FORMS, Geometry
from verify_numba.lockstep import LockstepError, RaceError
from verify_numba.lockstep.control_ops import barrier_rings
from verify_numba.lockstep.machine import Block, Warp, current

CLUSTER, SINGLE = BY_NAME["cluster72"], BY_NAME["single24"]
SCORE_WARPS = range(CLUSTER.value_warps, CLUSTER.first_softmax_warp)
FORMS = pytest.mark.parametrize("g", [CLUSTER, SINGLE], ids=lambda g: g.name)
BATCH = make_batch(0, prefix=(150, 0, 5, 50), drafts=(9, 5, 3, 2), H=8)
"""More tiles than stages, and requests of one tile, so that every ring turns over and requests overlap; as many rows as
a block takes, so that every score and softmax warp has some."""
PREFIXES = make_batch(0, prefix=(100, *(5,) * 8), drafts=(1,) * 9, H=4)
"""To be run without the tails, at each of which all score warps meet, so that they may be tiles apart."""
SEEDS = 6
WAITS = [
    ("full", "score"),
    ("empty", "copy"),
    ("scores_full", "softmax"),
    ("scores_empty", "score"),
    ("weights_full", "value"),
    ("weights_empty", "softmax"),
    ("inverse_full", "value"),
    ("inverse_empty", "softmax"),
]
"""Rings of barriers and who waits there; the value warps' wait for `full` is implied by `weights_full`."""


def test_every_warp_has_rows() -> None:
    assert BATCH.T * BATCH.H >= max(CLUSTER.rows, SINGLE.rows)


@pytest.fixture(scope="module")
def clean() -> dict[Geometry, Result]:
    return {g: run(BATCH, g, workers=1) for g in (CLUSTER, SINGLE)}


@FORMS
@pytest.mark.parametrize("adversarial", [False, True])
def test_every_schedule_gives_the_same_bits(
    g: Geometry, adversarial: bool, clean: dict[Geometry, Result]
) -> None:
    for seed in range(SEEDS):
        assert run(BATCH, g, workers=1, seed=seed, adversarial=adversarial).same_bits(clean[g]), seed


@FORMS
def test_copies_that_land_as_late_as_they_may(g: Geometry, clean: dict[Geometry, Result]) -> None:
    assert run(BATCH, g, workers=1, adversarial=True).same_bits(clean[g])


@FORMS
def test_several_workers_in_any_order(g: Geometry) -> None:
    expected = run(BATCH, g, workers=4)
    for seed in range(2):
        assert run(BATCH, g, workers=4, seed=seed, adversarial=True, check_races=True).same_bits(expected), (
            seed
        )


@pytest.mark.parametrize("g", (*CLUSTER_FORMS, *SINGLE_FORMS), ids=lambda g: g.name)
def test_score_warps_far_apart(g: Geometry) -> None:
    expected = run(PREFIXES, g, workers=1, parts="PREFIX", check_races=True)
    for seed in range(SEEDS):
        found = run(PREFIXES, g, workers=1, parts="PREFIX", seed=seed, adversarial=True, check_races=True)
        assert found.same_bits(expected), seed


def role_of(g: Geometry, warp: int) -> str:
    if warp < g.value_warps:
        return "value"
    if warp < g.first_softmax_warp:
        return "score"
    return "softmax" if warp < g.first_copy_warp else "copy"


@contextmanager
def without_wait(g: Geometry, ring: str, role: str) -> Iterator[None]:
    """Takes one role's waits for one ring of barriers away."""
    first, length, _ = barrier_rings(g)[ring]
    bars = range(first, first + 8 * length, 8)
    wait = Warp.wait_mbarrier

    def careless(warp: Warp, bar: int, parity: int) -> None:
        if bar not in bars or role_of(g, g.place(warp.index)) != role:
            wait(warp, bar, parity)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Warp, "wait_mbarrier", careless)
        yield


def is_noticed(g: Geometry, expected: Result, seed: int, **options: Any) -> bool:
    """Whether an adversarial run ends with an error or another result."""
    try:
        found = run(BATCH, g, workers=1, seed=seed, adversarial=True, **options)
    except LockstepError:
        return True
    return not found.same_bits(expected)


@FORMS
@pytest.mark.parametrize(("ring", "role"), WAITS, ids=[f"{role}-{ring}" for ring, role in WAITS])
def test_a_missing_wait_is_noticed(g: Geometry, ring: str, role: str, clean: dict[Geometry, Result]) -> None:
    expected = clean[g]
    with without_wait(g, ring, role):
        assert any(is_noticed(g, expected, seed) for seed in range(2 * SEEDS))
        with pytest.raises(LockstepError):  # in the first order there is, whatever comes out
            run(BATCH, g, workers=1, check_races=True)


@pytest.mark.parametrize("g", CLUSTER_FORMS, ids=lambda g: g.name)
def test_one_buffer_for_the_partners_parts_would_be_too_few(g: Geometry) -> None:
    """Without a credit from the partner, two are what keeps its parts from being overwritten."""
    partner, size = g.shared.partner, g.k_groups * g.score_bytes

    def change(ops: SimpleNamespace) -> None:
        send_part, gather_scores = ops.send_part, ops.gather_scores

        def send(products: Array, scores: int, *rest: int) -> None:
            send_part(products, partner + (scores - partner) % size, *rest)

        ops.send_part = send
        ops.gather_scores = lambda scores, _, me: gather_scores(scores, partner, me)

    expected = run(BATCH, g, workers=1)
    assert any(is_noticed(g, expected, seed, change=change) for seed in range(2 * SEEDS))
    with pytest.raises(RaceError, match="a copy that completes at scores_full"):
        for seed in range(2 * SEEDS):
            run(BATCH, g, workers=1, seed=seed, check_races=True, change=change)


@pytest.mark.parametrize("lost", [0, -1])
def test_a_part_that_is_not_sent_is_noticed(lost: int) -> None:
    def change(ops: SimpleNamespace) -> None:
        send_part = ops.send_part

        def send(products: Array, scores: int, *rest: int) -> None:
            if CLUSTER.place(current().index) != SCORE_WARPS[lost]:
                send_part(products, scores, *rest)

        ops.send_part = send

    with pytest.raises(LockstepError, match=r"scores_full\[0\] .* bytes are missing"):
        run(BATCH, CLUSTER, workers=1, change=change)


@FORMS
def test_cleaning_values_before_all_have_scored_is_a_race(
    g: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
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
