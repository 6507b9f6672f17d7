"""Rings to which the partner block writes without a credit: one buffer fewer, and something is overwritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import make_batch
from tests.lockstep.schedules import is_noticed, starving
from tests.lockstep.support import Array, Change, run
from verify_numba.geometry import CLUSTER_FORMS, PARTNER_BUFFERS, SINGLE_FORMS, Geometry
from verify_numba.lockstep import RaceError
from verify_numba.lockstep.machine import Warp, current

BATCH = make_batch(21, prefix=(100, 0, 0, 0, 0, 0, 0, 40), drafts=(9, 5, 3, 2, 4, 1, 6, 3), H=8)
"""Long requests, and of one tile many one after another: the partner is furthest ahead where requests are short."""
SEEDS = 8
FORMS = pytest.mark.parametrize("g", CLUSTER_FORMS, ids=lambda g: g.name)


class Turns:
    """How often each warp has come to a point: the number of its tile or request."""

    def __init__(self) -> None:
        self._count: Counter[Warp] = Counter()

    def now(self) -> int:
        return self._count[current()]

    def next(self) -> int:
        turn = self.now()
        self._count[current()] += 1
        return turn


def squeeze_scores(g: Geometry, buffers: int) -> Change:
    """Parts from the partner lie in a shorter ring; its barriers stay as they are."""
    at, size = g.shared.partner, g.k_groups * g.score_bytes

    def change(ops: SimpleNamespace) -> None:
        gather_scores = ops.gather_scores
        sent, read = Turns(), Turns()

        def squeezed(deliver: Callable[..., None]) -> Callable[..., None]:
            def deliver_squeezed(products: Array, own: int, partner: int, *rest: int) -> None:
                deliver(products, own, at + size * (sent.next() % buffers) + (partner - at) % size, *rest)

            return deliver_squeezed

        def gather_squeezed(scores: int, partner: int, *rest: int) -> Array:
            whole: Array = gather_scores(scores, at + size * (read.next() % buffers), *rest)
            return whole

        ops.deliver_even, ops.deliver_odd = squeezed(ops.deliver_even), squeezed(ops.deliver_odd)
        ops.gather_scores = gather_squeezed

    return change


def squeeze_weights(g: Geometry, buffers: int) -> Change:
    """Weights, and the notes that belong to them."""
    at = g.shared

    def change(ops: SimpleNamespace) -> None:
        post_note, post_weights = ops.post_note, ops.post_weights
        any_grew, scale_o, accumulate = ops.any_grew, ops.scale_o, ops.accumulate
        posted, read = Turns(), Turns()

        def note(turn: int) -> int:
            return at.alpha + g.note_bytes * (turn % buffers)

        def weights(turn: int) -> int:
            return at.weights + g.weight_bytes * (turn % buffers)

        def post_note_squeezed(place: int, *rest: Any) -> None:
            post_note(note(posted.now()) if place < at.inverse else place, *rest)

        def product(o: Array, stage: int, _: int, me: int) -> Array:
            added: Array = accumulate(o, stage, weights(read.next()), me)
            return added

        ops.post_note = post_note_squeezed
        ops.post_weights = lambda _, *rest: post_weights(weights(posted.next()), *rest)
        ops.any_grew = lambda _: any_grew(note(read.now()))
        ops.scale_o = lambda o, _: scale_o(o, note(read.now()))
        ops.accumulate = product

    return change


def squeeze_inverses(g: Geometry, buffers: int) -> Change:
    """Denominators."""
    at = g.shared

    def change(ops: SimpleNamespace) -> None:
        post_note, store_out = ops.post_note, ops.store_out
        posted, read = Turns(), Turns()

        def place(turn: int) -> int:
            return at.inverse + g.note_bytes * (turn % buffers)

        def post_note_squeezed(note: int, *rest: Any) -> None:
            post_note(note if note < at.inverse else place(posted.next()), *rest)

        ops.post_note = post_note_squeezed
        ops.store_out = lambda o, _, *rest: store_out(o, place(read.next()), *rest)

    return change


RINGS = [
    ("scores_full", squeeze_scores, lambda g: PARTNER_BUFFERS, "softmax"),
    ("weights_full", squeeze_weights, lambda g: g.weight_buffers, "value"),
    ("inverse_full", squeeze_inverses, lambda g: g.inverse_buffers, "value"),
]
"""The barrier that counts what arrives, the buffers there are, which are the fewest that do, and who must be late for
fewer to be overwritten."""
EACH = pytest.mark.parametrize(("bar", "squeeze", "buffers", "late"), RINGS, ids=[bar for bar, *_ in RINGS])


@FORMS
@EACH
def test_a_shorter_ring_is_overwritten(g: Geometry, bar: str, squeeze: Any, buffers: Any, late: str) -> None:
    """As the checker of races sees it in some order of the warps, whatever comes out."""
    with pytest.raises(RaceError, match=f"a copy that completes at {bar}"):
        for seed in range(SEEDS):
            for rank in range(g.cluster):
                with starving(g, late, rank):
                    run(BATCH, g, workers=1, seed=seed, check_races=True, change=squeeze(g, buffers(g) - 1))


@FORMS
@EACH
def test_what_a_shorter_ring_gives_is_wrong(g: Geometry, bar: str, squeeze: Any, buffers: Any, late: str) -> None:
    expected = run(BATCH, g, workers=1)
    assert any(
        is_noticed(BATCH, g, expected, late, rank, seed, change=squeeze(g, buffers(g) - 1))
        for seed in range(SEEDS)
        for rank in range(g.cluster)
    )


@FORMS
@EACH
def test_as_many_as_needed_are_enough(g: Geometry, bar: str, squeeze: Any, buffers: Any, late: str) -> None:
    """So it is the missing buffer that the tests above find fault with."""
    expected = run(BATCH, g, workers=1)
    for rank in range(g.cluster):
        for adversarial in (False, True):
            options = {"seed": rank, "adversarial": adversarial, "check_races": True}
            with starving(g, late, rank):
                found = run(BATCH, g, workers=1, change=squeeze(g, buffers(g)), **options)
            assert found.same_bits(expected)


@pytest.mark.parametrize("g", SINGLE_FORMS, ids=lambda g: g.name)
def test_a_block_alone_needs_every_buffer_of_weights(g: Geometry) -> None:
    """So far ahead its softmax warps may be."""
    with pytest.raises(RaceError, match="shared byte"):
        for seed in range(SEEDS):
            with starving(g, "value", 0):
                run(BATCH, g, workers=1, seed=seed, check_races=True, change=squeeze_weights(g, g.weight_buffers - 1))
