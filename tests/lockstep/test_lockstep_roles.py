"""Which warp has which role, and what warps compute of rows and columns that are not theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases import make_batch
from tests.lockstep.support import FORMS, Array, check, run
from verify_numba.geometry import Geometry
from verify_numba.lockstep.exchange_ops import tiles_of_warp
from verify_numba.lockstep.machine import current

PHANTOM = [g for g in FORMS if g.n_tiles % g.softmax_stride]
"""Some softmax warps have a row tile that is not there, or none at all that is."""
UNEVEN = [g for g in FORMS if g.uneven_columns]
"""The last value warp multiplies columns that are not there."""


def test_roles_follow_one_another_in_the_order_of_warps(form: Geometry) -> None:
    """The kernel hands each warp its number within its role."""
    g = form
    takers: dict[str, set[tuple[int, int | None]]] = {}

    def note(ops: Any) -> None:
        def noted(name: str, number: int | None) -> Any:
            original = getattr(ops, name)

            def op(*args: Any) -> Any:
                me = None if number is None else args[number]
                takers.setdefault(name, set()).add((current().index, me))
                return original(*args)

            return op

        for name, number in (("accumulate", 3), ("score", None), ("gather_scores", 2), ("copy_rows", None)):
            setattr(ops, name, noted(name, number))

    run(make_batch(16, prefix=(50,), drafts=(9,), H=8), g, workers=1, change=note)
    warps = g.threads // 32
    assert takers["accumulate"] == {(me, me) for me in range(g.value_warps)}
    assert {warp for warp, _ in takers["score"]} == set(range(g.value_warps, g.first_softmax_warp))
    assert takers["gather_scores"] == {(g.first_softmax_warp + me, me) for me in range(g.softmax_warps)}
    assert {warp for warp, _ in takers["copy_rows"]} == set(range(g.first_copy_warp, warps))


@pytest.mark.parametrize("g", PHANTOM, ids=lambda g: g.name)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_row_tile_that_is_not_there_decides_nothing(g: Geometry, seed: int | None) -> None:
    """Its rows are the next row block's. NaN there, which no maximum notices, is in no result."""
    batch = make_batch(17, prefix=(50, 3), drafts=(13, 18), H=8)
    poisoned = set()

    def poison(ops: Any) -> None:
        gather_scores = ops.gather_scores

        def gather(scores: int, partner: int, me: int, rank: int) -> Array:
            whole: Array = gather_scores(scores, partner, me, rank)
            there = len(tiles_of_warp(g, g.cluster * me + rank))
            if there < g.softmax_tiles:
                whole[:, 8 * there :] = np.nan
                poisoned.add((rank, me))
            return whole

        ops.gather_scores = gather

    clean = run(batch, g, workers=2, seed=seed)
    check(batch, clean)
    with np.errstate(invalid="ignore"):
        assert run(batch, g, workers=2, seed=seed, change=poison).same_bits(clean)
    assert len(poisoned) == g.softmax_stride * g.softmax_tiles - g.n_tiles


@pytest.mark.parametrize("g", PHANTOM, ids=lambda g: g.name)
def test_a_row_tile_that_is_not_there_may_have_the_scores_of_another(g: Geometry) -> None:
    """On a GPU, of the warp's first row tile. Its rows may see other tokens, and its maxima grow then: it only rescales
    what it would not have to."""
    batch = make_batch(17, prefix=(50, 3), drafts=(13, 18), H=8, logit_std=30.0)
    shared = set()

    def share(ops: Any) -> None:
        gather_scores = ops.gather_scores

        def gather(scores: int, partner: int, me: int, rank: int) -> Array:
            whole: Array = gather_scores(scores, partner, me, rank)
            there = len(tiles_of_warp(g, g.cluster * me + rank))
            if 0 < there < g.softmax_tiles:
                whole[:, 8 * there :] = whole[:, :8]
                shared.add((rank, me))
            return whole

        ops.gather_scores = gather

    check(batch, run(batch, g, workers=2, change=share))
    assert bool(shared) == (g.softmax_tiles > 1)


@pytest.mark.parametrize("g", UNEVEN, ids=lambda g: g.name)
@pytest.mark.parametrize("workers", [1, 3])
def test_columns_behind_the_last_are_in_no_result(g: Geometry, workers: int) -> None:
    """The last value warp multiplies rope columns too: what comes of it is dropped."""
    batch = make_batch(18, prefix=(50, 3), drafts=(9, 5), H=8)
    owned = g.value_columns - 16 * g.m_tiles * (g.value_warps - 1)

    def poison(ops: Any) -> None:
        accumulate = ops.accumulate

        def product(o: Array, stage: int, weights: int, me: int) -> Array:
            whole: Array = accumulate(o, stage, weights, me)
            if me == g.value_warps - 1:
                whole[:, owned:] = np.nan
            return whole

        ops.accumulate = product

    clean = run(batch, g, workers=workers)
    check(batch, clean)
    with np.errstate(invalid="ignore"):
        assert run(batch, g, workers=workers, change=poison).same_bits(clean)
