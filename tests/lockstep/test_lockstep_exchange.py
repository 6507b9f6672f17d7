"""What the blocks of a cluster hand each other: who owns which row tile, what arrives where, how many bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.cases import make_batch
from tests.lockstep.support import Array, inside, run
from tests.lockstep.tiles import BF16, floats, notes_of
from verify_numba.geometry import CLUSTER_FORMS, PARTNER_BUFFERS, SINGLE_FORMS, TILE, WARP, Geometry
from verify_numba.lockstep.control_ops import barrier_rings
from verify_numba.lockstep.exchange_ops import add_up, tiles_of_block, tiles_of_warp
from verify_numba.lockstep.machine import Block, Warp, current

BATCH = make_batch(20, prefix=(70, 0, 0, 5), drafts=(9, 5, 3, 2), H=8)
"""Requests of several tiles and of one, and rows for every softmax warp."""
TILES = 10
"""Of all its requests."""
CLUSTERS = pytest.mark.parametrize("g", CLUSTER_FORMS, ids=lambda g: g.name)
SINGLES = pytest.mark.parametrize("g", SINGLE_FORMS, ids=lambda g: g.name)


def own_tiles(g: Geometry, me: int, rank: int) -> list[int]:
    """Row tiles of softmax warp `me` of block `rank`: the blocks take turns, and the warps of a block."""
    mine = [tile for tile in range(g.n_tiles) if tile % g.cluster == rank]
    return mine[me :: g.softmax_warps]


def test_blocks_and_their_warps_take_row_tiles_in_turns(form: Geometry) -> None:
    for rank in range(form.cluster):
        for me in range(form.softmax_warps):
            assert list(tiles_of_warp(form, form.cluster * me + rank)) == own_tiles(form, me, rank)
        mine = [own_tiles(form, me, rank) for me in range(form.softmax_warps)]
        assert sorted(sum(mine, [])) == list(tiles_of_block(form, rank))


def set_up(g: Geometry) -> tuple[Warp, int]:
    """All barriers, in every block; the warp and its block's rank."""
    warp = current()
    for name, (offset, length, count) in barrier_rings(g).items():
        for i in range(length):
            warp.block.init_mbarrier(offset + 8 * i, count, f"{name}[{i}]")
    warp.sync(warp.cluster.all_warps)
    return warp, warp.block.x


def deliver_all(g: Geometry, ops: Any, parts: Array, rank: int, bar: int) -> None:
    """What all score warps of a block hand over for one tile: `parts` is [k_groups, 16, rows]."""
    at = g.shared
    for group, part in np.ndindex(g.groups, g.k_groups):
        first = g.group_tiles * group
        mine = parts[part, :, 8 * first :][:, : 8 * g.group_tiles]
        deliver = ops.deliver_even if first % g.cluster == rank else ops.deliver_odd
        deliver(mine, at.scores + g.score_bytes * part, at.partner + g.score_bytes * part, bar, first)
        ops.arrive(bar)


def test_softmax_warps_gather_the_parts_of_both_blocks(form: Geometry) -> None:
    g, at = form, form.shared
    parts = floats(4, g.cluster, g.k_groups, TILE, g.rows)
    whole = parts.sum(axis=(0, 1), dtype=np.float64).reshape(TILE, g.n_tiles, 8)

    def body(ops: Any) -> None:
        _, rank = set_up(g)
        deliver_all(g, ops, parts[rank], rank, at.scores_full)
        for me in range(g.softmax_warps):
            ops.arm_scores(at.scores_full, me, rank)
        ops.wait_cluster(at.scores_full, 0)
        for me in range(g.softmax_warps):
            found = ops.gather_scores(at.scores, at.partner, me, rank)
            assert found.shape == (TILE, 8 * g.softmax_tiles)
            expected = np.zeros((TILE, g.softmax_tiles, 8))
            mine = own_tiles(g, me, rank)
            expected[:, : len(mine)] = whole[:, mine]
            assert np.allclose(found, expected.reshape(TILE, -1), rtol=1e-5, atol=1e-5)
            assert not found[:, 8 * len(mine) :].any()

    inside(g, body)


@CLUSTERS
def test_no_part_is_stored_in_a_block_that_does_not_want_it(g: Geometry) -> None:
    """A block has room for its own row tiles alone."""
    at = g.shared

    def body(ops: Any) -> None:
        warp, rank = set_up(g)
        deliver_all(g, ops, np.ones((g.k_groups, TILE, g.rows), np.float32), rank, at.scores_full)
        ops.arm_scores(at.scores_full, 0, rank)
        ops.wait_cluster(at.scores_full, 0)
        shape = g.k_groups, g.own_tiles, TILE * 8
        for area in (at.scores, at.partner):
            written = ~np.isnan(warp.block.shared.view(area, np.float32, shape))
            assert (written == (np.arange(g.own_tiles) < len(tiles_of_block(g, rank)))[None, :, None]).all()
        behind = at.partner + g.k_groups * g.score_bytes
        assert np.isnan(warp.block.shared.view(behind, np.float32, ((at.weights - behind) // 4,))).all()

    inside(g, body)


def test_parts_are_added_in_pairs() -> None:
    parts: Array = np.array([2**24, 1, 1, -(2**24), 3], np.float32)
    pairs = (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert add_up([*parts]) == pairs + parts[4]
    assert add_up([*parts]) != sum(parts)
    assert add_up([*parts[:1]]) == parts[0]


def test_weights_and_notes_of_every_row_arrive_at_both_blocks(form: Geometry) -> None:
    g, at = form, form.shared
    p, factors = np.abs(floats(9, g.n_tiles, TILE, 8)), np.abs(floats(10, g.n_tiles, 8))
    flags = np.arange(g.softmax_stride, dtype=np.int32) % 3

    def body(ops: Any) -> None:
        warp, rank = set_up(g)
        for me in range(g.softmax_warps):
            first, mine = g.cluster * me + rank, own_tiles(g, me, rank)
            absent = g.softmax_tiles - len(mine)
            weights = np.concatenate([p[mine], np.full((absent, TILE, 8), np.nan)], dtype=np.float32)
            rows = np.concatenate([factors[mine], np.full((absent, 8), np.nan)], dtype=np.float32)
            tile = weights.transpose(1, 0, 2).reshape(TILE, -1)
            ops.post_note(at.alpha, rows.ravel(), int(flags[first]), first, at.weights_full, 0)
            ops.post_weights(at.weights, tile, first, at.weights_full, 0)
            ops.arrive_expecting(at.weights_full, 4 * WARP + ops.weights_from_partner(me, rank))
        ops.wait_cluster(at.weights_full, 0)
        view = warp.block.shared.view
        assert np.array_equal(view(at.weights, np.uint16, p.shape).view(BF16), p.astype(BF16))
        expected = notes_of(g, factors, flags)
        assert expected.nbytes == g.note_bytes
        assert np.array_equal(view(at.alpha, np.float32, expected.shape), expected, equal_nan=True)
        assert ops.any_grew(at.alpha) == (g.softmax_stride > 1)

    inside(g, body)


@CLUSTERS
def test_both_blocks_multiply_by_the_same_weights_and_factors(g: Geometry) -> None:
    """Bit for bit: otherwise the columns of a row would differ in weights."""
    seen: dict[int, list[bytes]] = {0: [], 1: []}

    def change(ops: SimpleNamespace) -> None:
        accumulate, store_out = ops.accumulate, ops.store_out

        def note(offset: int, size: int) -> None:
            block = current().block
            seen[block.x].append(bytes(block.shared.data[offset : offset + size]))

        def product(o: Array, stage: int, weights: int, me: int) -> Array:
            if me == 0:
                alpha = g.shared.alpha + (weights - g.shared.weights) // g.weight_bytes * g.note_bytes
                note(weights, g.weight_bytes)
                note(alpha, g.note_bytes)
            result: Array = accumulate(o, stage, weights, me)
            return result

        def stored(o: Array, inverse: int, *rest: int) -> None:
            if rest[-1] == 0:
                note(inverse, g.note_bytes)
            store_out(o, inverse, *rest)

        ops.accumulate, ops.store_out = product, stored

    run(BATCH, g, workers=1, seed=3, adversarial=True, change=change)
    assert len(seen[0]) >= 2 * TILES + BATCH.bs
    assert seen[0] == seen[1]


class Sent:
    """Bytes under way to each block, by the barrier that counts them; nothing arrives."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes: dict[tuple[int, str], int] = {}
        patch.setattr(Warp, "write_async", lambda warp, *args: self.write(warp, *args))

    def write(self, warp: Warp, block: Block, offset: int, shape: Any, data: Any, barrier: Any) -> None:
        assert block is not warp.block
        ring = barrier.label.split("[")[0]
        self.bytes[block.x, ring] = self.bytes.get((block.x, ring), 0) + data().nbytes


@CLUSTERS
def test_a_softmax_warp_expects_what_its_partner_sends(g: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warp by warp, those without any row tile included."""
    state = np.ones(8 * g.softmax_tiles, np.float32)
    tile = np.ones((TILE, 8 * g.softmax_tiles), np.float32)
    at = g.shared

    def body(ops: Any) -> None:
        _, rank = set_up(g)
        partner = 1 - rank
        for me in range(g.softmax_warps):
            first = g.cluster * me + rank
            sent = Sent(monkeypatch)
            ops.post_note(at.inverse, state, 0, first, at.inverse_full, 0)
            ops.post_note(at.alpha, state, 1, first, at.weights_full, 0)
            ops.post_weights(at.weights, tile, first, at.weights_full, 0)
            assert sent.bytes == {
                (partner, "inverse_full"): 4 * WARP,
                (partner, "weights_full"): 4 * WARP + ops.weights_from_partner(me, partner),
            }

    inside(g, body)


@CLUSTERS
def test_a_block_announces_the_parts_that_its_partner_sends(g: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: dict[int, int] = {}

    def arrive(warp: Warp, bar: int, expect: int = 0) -> None:
        if expect:
            announced[warp.block.x] = announced.get(warp.block.x, 0) + expect

    def body(ops: Any) -> None:
        _, rank = set_up(g)
        sent = Sent(monkeypatch)
        monkeypatch.setattr(Warp, "arrive_mbarrier", arrive)
        bar = g.shared.scores_full
        deliver_all(g, ops, np.ones((g.k_groups, TILE, g.rows), np.float32), rank, bar)
        for me in range(g.softmax_warps):
            ops.arm_scores(bar, me, 1 - rank)
        assert sum(sent.bytes.values()) == announced.pop(rank, 0)
        assert {block for block, _ in sent.bytes} <= {1 - rank}

    inside(g, body)


@SINGLES
def test_a_block_alone_sends_nothing(g: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a barrier of its wait for bytes: only copies from global memory are asynchronous."""
    write_async, arrive = Warp.write_async, Warp.arrive_mbarrier
    stages = range(g.shared.stage, g.shared.scores)
    copies = 0

    def copy(warp: Warp, block: Block, offset: int, *args: Any, **options: Any) -> None:
        nonlocal copies
        copies += 1
        assert block is warp.block
        assert offset in stages
        assert options["arrivals"]
        write_async(warp, block, offset, *args, **options)

    def arrive_alone(warp: Warp, bar: int, expect: int = 0) -> None:
        assert not expect
        arrive(warp, bar, expect)

    monkeypatch.setattr(Warp, "write_async", copy)
    monkeypatch.setattr(Warp, "arrive_mbarrier", arrive_alone)
    run(BATCH, g, workers=1)
    assert copies >= TILES


@CLUSTERS
def test_what_a_block_sends_goes_to_its_partner_alone(g: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    write_async = Warp.write_async
    rings = {"scores_full", "weights_full", "inverse_full"}
    used: set[tuple[int, str]] = set()

    def send(warp: Warp, block: Block, *args: Any, **options: Any) -> None:
        if not options.get("arrivals"):
            assert warp.cluster is block.cluster
            assert block is not warp.block
            used.add((block.x, args[3].label.split("[")[0]))
        write_async(warp, block, *args, **options)

    monkeypatch.setattr(Warp, "write_async", send)
    run(BATCH, g, workers=1)
    assert used == {(rank, ring) for rank in range(2) for ring in rings}


def test_every_form_has_room_for_what_is_under_way(form: Geometry) -> None:
    """Rings lie where nothing else does; the one of scores is indexed by the lower bits of a count."""
    g, at = form, form.shared
    assert PARTNER_BUFFERS & (PARTNER_BUFFERS - 1) == 0
    assert at.full - at.inverse >= g.inverse_buffers * g.note_bytes
    assert at.alpha - at.weights >= g.weight_buffers * g.weight_bytes
    assert at.inverse - at.alpha >= g.weight_buffers * g.note_bytes
    assert at.weights - at.partner >= (g.cluster - 1) * PARTNER_BUFFERS * g.k_groups * g.score_bytes
    assert at.partner - at.scores >= g.k_groups * g.score_bytes
