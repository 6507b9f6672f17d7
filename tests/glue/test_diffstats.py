"""The device-side comparison against a plain computation of the same figures."""

import math

import pytest
import torch

from sglang_glue.board import RING, Board, Tag
from sglang_glue.counters import Counters
from sglang_glue.diffstats import DiffStats
from tests.glue.fakes import attend, make_call

THRESHOLD = 0.01


def pair(call, *, noise=0.0, seed=0):
    triton = torch.empty_like(call.o)
    attend(call, triton)
    generator = torch.Generator().manual_seed(seed)
    ours = (triton.float() * (1 + noise * torch.randn(triton.shape, generator=generator))).to(torch.bfloat16)
    return ours, triton


def board_and_stats(layers=2):
    board = Board(layers + 1, "cpu")
    return board, DiffStats(board, THRESHOLD), Counters(list(range(layers)), board)


def totals(board, counters, tag="eager"):
    board.publish()
    return counters.snapshot()["validate"][tag]


def test_equal_outputs_give_zero():
    board, stats, counters = board_and_stats()
    call = make_call()
    ours, triton = pair(call)
    assert not stats.add(Tag.EAGER, 0, call, ours, triton)
    found = totals(board, counters)
    assert found["calls"] == 1 and found["rows"] == 8
    assert found["relative_norm"] == found["max_abs"] == found["mismatches"] == 0


def test_sums_and_maxima_over_calls():
    board, stats, counters = board_and_stats()
    pairs = [pair(make_call(seed=s), noise=0.003 * (s + 1), seed=s) for s in range(3)]
    for s, (ours, triton) in enumerate(pairs):
        stats.add(Tag.EAGER, s % 2, make_call(seed=s), ours, triton)
    diffs = [(o.double() - t.double()) for o, t in pairs]
    triton = [t.double() for _, t in pairs]
    found = totals(board, counters)
    squares = sum(d.square().sum() for d in diffs) / sum(t.square().sum() for t in triton)
    assert found["relative_norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)
    assert found["max_abs"] == pytest.approx(max(float(d.abs().max()) for d in diffs), rel=1e-5)
    assert found["max_rel"] == pytest.approx(
        max(float(d.norm() / t.norm()) for d, t in zip(diffs, triton, strict=True)), rel=1e-5
    )
    assert found["worst_layer"] == 0 and found["worst_bs"] == 2


def test_a_mismatch_is_tagged_with_where_it_was():
    board, stats, counters = board_and_stats()
    call = make_call(lengths=(5, 9, 2), seed=3)
    ours, triton = pair(call)
    ours[6, 1, 17] += 2.0  # second request, prefix 9
    assert stats.add(Tag.GRAPH, 1, call, ours, triton)
    board.publish()
    (found,) = counters.snapshot()["validate"]["recent_mismatches"]
    assert found["tag"] == "graph" and found["layer"] == 1 and found["bs"] == 3 and found["prefix"] == 9
    assert found["max_abs"] == pytest.approx(2.0, rel=1e-2)


def test_padded_requests_are_left_out():
    board, stats, counters = board_and_stats()
    call = make_call(lengths=(5, 1))
    call.kv_indices[5] = 0  # the sink: what a graph pads with
    ours, triton = pair(call)
    ours[4:] = float("nan")
    assert not stats.add(Tag.GRAPH, 0, call, ours, triton)
    found = totals(board, counters, "graph")
    assert found["rows"] == 4 and found["nan_ours"] == 0 and found["mismatches"] == 0


def test_a_call_of_padding_alone_is_not_a_call_compared():
    board, stats, counters = board_and_stats()
    warm_up = make_call(lengths=(1, 1))
    warm_up.kv_indices[:2] = 0
    assert not stats.add(Tag.EAGER, 0, warm_up, *pair(warm_up, noise=0.5))
    board.publish()
    assert counters.snapshot()["validate"] is None
    served = make_call(seed=1)
    stats.add(Tag.EAGER, 0, served, *pair(served, noise=0.002))
    assert totals(board, counters)["calls"] == 1


def test_an_empty_prefix_is_not_padding():
    board, stats, counters = board_and_stats()
    call = make_call(lengths=(0,))._replace(kv_indices=torch.empty(0, dtype=torch.int64))
    stats.add(Tag.EAGER, 0, call, *pair(call))
    assert totals(board, counters)["rows"] == 4


def test_nan_of_ours_is_a_mismatch_and_poisons_no_sum():
    board, stats, counters = board_and_stats()
    call = make_call()
    ours, triton = pair(call, noise=0.002)
    ours[3, 0, 0] = float("nan")
    assert stats.add(Tag.EAGER, 0, call, ours, triton)
    found = totals(board, counters)
    assert found["nan_ours"] == 1 and found["mismatches"] == 1
    assert 0 < found["relative_norm"] < THRESHOLD


def test_nan_of_triton_is_counted_apart():
    board, stats, counters = board_and_stats()
    call = make_call()
    ours, triton = pair(call)
    triton[0, 0, 0] = float("inf")
    assert not stats.add(Tag.EAGER, 0, call, ours, triton)
    assert totals(board, counters)["nan_triton"] == 1


def test_the_newest_mismatches_are_kept():
    board, stats, counters = board_and_stats()
    call = make_call()
    ours, triton = pair(call)
    for i in range(RING + 6):
        stats.add(Tag.EAGER, 0, call, ours + (i + 1), triton)
    stats.add(Tag.EAGER, 0, call, triton, triton)
    board.publish()
    found = counters.snapshot()["validate"]["recent_mismatches"]
    kept = sorted(round(m["max_abs"]) for m in found)
    assert len(found) == RING and kept[-1] == RING + 6 and kept[0] == 7


def test_nothing_is_visible_before_it_is_published():
    _board, stats, counters = board_and_stats()
    call = make_call()
    stats.add(Tag.EAGER, 0, call, *pair(call))
    assert counters.snapshot()["validate"] is None
