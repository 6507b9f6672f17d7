"""What the blocks of a cluster hand each other, as PTX does it: the words, their places, and the bytes expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from ptx_lanes import ONE, WORD, ZERO, Effects, Pair, Product, Sum, run_warp

from verify_numba.geometry import CLUSTER_FORMS, SINGLE_FORMS, WARP, Geometry
from verify_numba.lockstep.exchange_ops import tiles_of_block, tiles_of_warp

pytest.importorskip("numba.cuda", reason="compiling kernels needs numba-cuda")
from ptx_kernels import compiled

BOTH = (*CLUSTER_FORMS, *SINGLE_FORMS)
FORMS = pytest.mark.parametrize("g", BOTH, ids=lambda g: g.name)
CLUSTERS = pytest.mark.parametrize("g", CLUSTER_FORMS, ids=lambda g: g.name)
OWN, PARTNER, PLACE, BAR, REACH = 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20
"""Addresses that cannot be taken for one another; REACH leads from one block's shared memory to the other's."""


def warps(g: Geometry) -> list[tuple[int, int, int]]:
    """(rank, me, first row tile) of every softmax warp of the cluster."""
    return [(rank, me, g.cluster * me + rank) for rank in range(g.cluster) for me in range(g.softmax_warps)]


def run(
    g: Geometry,
    name: str,
    integers: Sequence[int],
    tile: Callable[[int], Sequence[Any]] = lambda _: (),
    shared: Mapping[int, Any] = MappingProxyType({}),
) -> Effects:
    return run_warp(compiled(g, name), lambda lane: [*tile(lane), *integers], shared)


def arrived(g: Geometry, effects: Effects, there: int = PLACE) -> dict[int, Any]:
    """What was stored in this block and, in a cluster, sent to the same place of the partner's."""
    assert {at - REACH: word for at, word in effects.sent.items()} == (effects.stored if g.cluster == 2 else {})
    assert effects.counted_at == ({BAR + REACH} if effects.sent else set())
    return {at - there: word for at, word in effects.stored.items()}


@FORMS
def test_a_note_has_the_factors_of_the_warps_rows_and_a_flag(g: Geometry) -> None:
    """Rows 2 t, 2 t + 1 of a row tile are with lanes t of four. The note has a word a lane, whoever has fewer tiles."""
    for _, _, first in warps(g):
        effects = run(
            g, "note", [PLACE, 77, first, BAR, REACH], lambda lane: [(lane % 4, i) for i in range(2 * g.softmax_tiles)]
        )
        found = arrived(g, effects)
        expected = {4 * lane: 77 for lane in range(8 * g.softmax_tiles, WARP)}
        for n in range(g.softmax_tiles):
            expected |= {16 * (2 * n + row % 2) + 4 * (row // 2): (row // 2, 2 * n + row % 2) for row in range(8)}
        assert found == {4 * WARP * first + at: word for at, word in expected.items()}


def posted_notes(g: Geometry, flags: Sequence[int]) -> dict[int, Any]:
    """What all softmax warps of the cluster post, by its place: factors are named (row tile, row)."""
    words = {}
    for _, _, first in warps(g):

        def rows(lane: int, first: int = first) -> list[tuple[int, int]]:
            return [(first + g.softmax_stride * (i // 2), 2 * (lane % 4) + i % 2) for i in range(2 * g.softmax_tiles)]

        words |= run(g, "note", [PLACE, flags[first], first, BAR, REACH], rows).stored
    return words


@FORMS
@pytest.mark.parametrize("grew", [0, 1])
def test_value_warps_find_the_factor_of_every_row(g: Geometry, grew: int) -> None:
    """1 where the softmax warp's maxima have not grown: what it posted is unset."""
    size, flags = 4 * g.m_tiles * g.n_tiles, [(first + grew) % 2 for first in range(g.softmax_stride)]
    o = [("o", i) for i in range(size)]
    found = run(g, "scale", [PLACE, OWN], lambda _: o, posted_notes(g, flags))
    for lane in range(32):
        for m in range(g.m_tiles):
            for n in range(g.n_tiles):
                for e in range(4):
                    i = 4 * (m * g.n_tiles + n) + e
                    factor = (n, 2 * (lane % 4) + e % 2) if flags[n % g.softmax_stride] else ONE
                    assert found.stored[OWN + WORD * (size * lane + i)] == Product(frozenset({o[i], factor}))


@FORMS
def test_value_warps_look_at_every_softmax_warps_flag(g: Geometry) -> None:
    places = set(posted_notes(g, [1] * g.softmax_stride))
    for grown in range(g.softmax_stride):
        notes = posted_notes(g, [int(first == grown) for first in range(g.softmax_stride)])
        found = run(g, "grew", [PLACE, BAR], shared=notes)
        assert found.loaded <= places
        assert [notes[at] for at in sorted(found.loaded)] == [int(w == grown) for w in range(g.softmax_stride)]


@FORMS
def test_weights_lie_by_row_tile_token_and_row(g: Geometry) -> None:
    def tile(lane: int) -> list[tuple[int, int, int]]:
        """(n, token, row) of each register of an accumulator."""
        return [(e // 4, lane // 4 + 8 * (e % 4 // 2), 2 * (lane % 4) + e % 2) for e in range(4 * g.softmax_tiles)]

    for _, _, first in warps(g):
        found = arrived(g, run(g, "weights", [PLACE, first, BAR, REACH], tile))
        assert found == {
            256 * tile + 16 * token + 2 * row: Pair((n, token, row), (n, token, row + 1))
            for n, tile in enumerate(tiles_of_warp(g, first))
            for token in range(16)
            for row in range(0, 8, 2)
        }


@CLUSTERS
@pytest.mark.parametrize("lanes_arrive", [False, True])
def test_a_softmax_warp_expects_what_its_partner_sends(g: Geometry, lanes_arrive: bool) -> None:
    """Warp by warp, those without any row tile included; one lane announces it, whether or not others arrive too."""
    g = replace(g, lanes_arrive=lanes_arrive)
    for rank, me, first in warps(g):
        partner = first + 1 - 2 * rank
        note = run(g, "note", [PLACE, 1, partner, BAR, REACH], lambda _: [0] * 2 * g.softmax_tiles)
        weights = run(g, "weights", [PLACE, partner, BAR, REACH], lambda _: [0] * 4 * g.softmax_tiles)
        expected = run(g, "expected", [BAR, me, rank])
        assert WORD * len(note.sent) == 4 * WARP
        assert expected.expected == [WORD * len(weights.sent)]
        assert expected.arrivals == g.arrivals(1)


def delivered(g: Geometry, group: int, rank: int, tile: Callable[[int], Sequence[Any]]) -> Effects:
    """What a score warp does: of its row tiles, the even or the odd ones are its block's."""
    first = g.group_tiles * group
    name = "deliver_even" if first % g.cluster == rank else "deliver_odd"
    return run(g, name, [OWN, PARTNER, BAR, first], tile)


@FORMS
def test_each_row_tile_of_scores_goes_to_the_block_that_it_is_for(g: Geometry) -> None:
    for rank in range(g.cluster):
        stored: dict[int, Any] = {}
        sent: dict[int, Any] = {}
        for group in range(g.groups):

            def tile(lane: int, group: int = group) -> list[tuple[int, int, int]]:
                return [(g.group_tiles * group + e // 4, lane, e % 4) for e in range(4 * g.group_tiles)]

            effects = delivered(g, group, rank, tile)
            assert effects.counted_at <= {BAR}
            stored |= {at - OWN: word for at, word in effects.stored.items()}
            sent |= {at - PARTNER: word for at, word in effects.sent.items()}
        assert stored == parts_of(g, rank)
        assert sent == (parts_of(g, 1 - rank) if g.cluster == 2 else {})


def parts_of(g: Geometry, rank: int) -> dict[int, Any]:
    """A part of the scores of a block's row tiles, as it lies in that block."""
    return {
        512 * i + 16 * lane + 4 * e: (tile, lane, e)
        for i, tile in enumerate(tiles_of_block(g, rank))
        for lane in range(32)
        for e in range(4)
    }


@CLUSTERS
def test_a_block_announces_the_parts_that_its_partner_sends(g: Geometry) -> None:
    """In one lane of its first softmax warp."""
    for rank in range(2):
        zeros = lambda _: [0] * 4 * g.group_tiles  # noqa: E731
        sent = sum(WORD * len(delivered(g, group, 1 - rank, zeros).sent) for group in range(g.groups))
        assert run(g, "arm", [BAR, 0, rank]).expected == [g.k_groups * sent]
        assert run(g, "arm", [BAR, 0, rank]).arrivals == 1
        assert not any(run(g, "arm", [BAR, me, rank]).arrivals for me in range(1, g.softmax_warps))


def leaves(value: Any) -> list[Any]:
    return [leaf for term in value.terms for leaf in leaves(term)] if isinstance(value, Sum) else [value]


@FORMS
def test_scores_are_gathered_from_all_parts_of_the_blocks(g: Geometry) -> None:
    blocks = (OWN, PARTNER) if g.cluster == 2 else (OWN,)
    areas = [block + g.score_bytes * part for block in blocks for part in range(g.k_groups)]
    for rank, me, first in warps(g):
        found = arrived(g, run(g, "gather", [OWN, PARTNER, me, rank, PLACE, first, BAR, REACH]))
        assert len(found) == 64 * len(tiles_of_warp(g, first))
        for tile in tiles_of_warp(g, first):
            for lane in range(32):
                for half in range(2):
                    pair = found[256 * tile + 128 * half + 4 * lane]
                    for e, value in enumerate((pair.low, pair.high)):
                        place = 512 * (tile // g.cluster) + 16 * lane + 4 * (2 * half + e)
                        assert sorted(leaf.address for leaf in leaves(value)) == [area + place for area in areas]


@pytest.mark.parametrize("g", [g for g in BOTH if g.n_tiles % g.softmax_stride], ids=lambda g: g.name)
def test_a_row_tile_that_is_not_there_has_the_scores_of_the_warps_first(g: Geometry) -> None:
    """So its maxima grow when theirs do. Where it is the warp's only one, it has none: zeros.

    Seen where the first warp of all, which has every row tile, would put its last."""
    incomplete = [(rank, me) for rank, me, first in warps(g) if len(tiles_of_warp(g, first)) < g.softmax_tiles]
    assert incomplete
    for rank, me in incomplete:
        found = arrived(g, run(g, "gather", [OWN, PARTNER, me, rank, PLACE, 0, BAR, REACH]))
        last = 256 * g.softmax_stride * (g.softmax_tiles - 1)
        for at in range(0, 256, WORD):
            assert found[last + at] == (found[at] if g.softmax_tiles > 1 else Pair(ZERO, ZERO))
