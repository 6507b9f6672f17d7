"""Which warp has which role, and what warps compute of rows and columns that are not theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases import make_batch
from tests.lockstep.support import FORMS, Array, check, run
from verify_numba.geometry import Geometry
from verify_numba.lockstep.machine import current

PHANTOM = [g for g in FORMS if g.n_tiles % g.softmax_tiles]
"""The last softmax warp has a row tile that is not there."""
UNEVEN = [g for g in FORMS if g.uneven_columns]
"""The last value warp multiplies columns that are not there."""


def test_warps_take_the_roles_of_their_places(form: Geometry) -> None:
    """The kernel works the place out by itself, and hands each role its number within the role."""
    g = form
    places: dict[str, set[tuple[int, int | None]]] = {}

    def note(ops: Any) -> None:
        def noted(name: str, numbered: bool) -> Any:
            original = getattr(ops, name)

            def op(*args: Any) -> Any:
                me = args[-1] if numbered else None
                places.setdefault(name, set()).add((g.place(current().index), me))
                return original(*args)

            return op

        for name in ("accumulate", "score", "gather_scores", "copy_rows"):
            setattr(ops, name, noted(name, numbered=name in ("accumulate", "gather_scores")))

    run(make_batch(16, prefix=(50,), drafts=(9,), H=8), g, workers=1, change=note)
    warps = g.threads // 32
    assert places["accumulate"] == {(me, me) for me in range(g.value_warps)}
    assert {place for place, _ in places["score"]} == set(range(g.value_warps, g.first_softmax_warp))
    assert places["gather_scores"] == {(g.first_softmax_warp + me, me) for me in range(g.softmax_warps)}
    assert {place for place, _ in places["copy_rows"]} == set(range(g.first_copy_warp, warps))


@pytest.mark.parametrize("g", PHANTOM, ids=lambda g: g.name)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_row_tile_that_is_not_there_decides_nothing(g: Geometry, seed: int | None) -> None:
    """Its rows are the next block's. NaN there, which no maximum notices, is in no result."""
    batch = make_batch(17, prefix=(50, 3), drafts=(13, 18), H=8)
    there = 8 * (g.n_tiles - g.softmax_tiles * (g.softmax_warps - 1))

    def poison(ops: Any) -> None:
        gather_scores = ops.gather_scores

        def gather(scores: int, partner: int, me: int) -> Array:
            whole: Array = gather_scores(scores, partner, me)
            if me == g.softmax_warps - 1:
                whole[:, there:] = np.nan
            return whole

        ops.gather_scores = gather

    clean = run(batch, g, workers=2, seed=seed)
    check(batch, clean)
    with np.errstate(invalid="ignore"):
        assert run(batch, g, workers=2, seed=seed, change=poison).same_bits(clean)


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
