"""Who does what in a block, for every form: warps to roles, columns and rows to warps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verify_numba.geometry import CLUSTER_FORMS, SINGLE_FORMS, WARP, WEIGHTS_AHEAD

FORMS = (*CLUSTER_FORMS, *SINGLE_FORMS)
M_TILE = 16
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


@pytest.fixture(params=FORMS, ids=lambda g: g.name)
def g(request):
    return request.param


def test_every_warp_has_one_role(g):
    """Value, score, softmax and copy warps follow one another."""
    first = [0, g.value_warps, g.first_softmax_warp, g.first_copy_warp, g.threads // WARP]
    counts = [end - start for start, end in zip(first, first[1:], strict=False)]
    assert counts == [g.value_warps, g.score_warps, g.softmax_warps, g.copy_warps]


def test_the_table_of_variants_in_the_docs(g):
    """docs/design.md: warps and tiles of each role, registers, stages, shared memory."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", DESIGN.read_text(), re.MULTILINE)
    (found,) = (cells for name, cells in rows if name == g.name)
    cells = re.sub(r",(?= )", "", found).split("|")
    value, score, softmax, copy, *sizes = (re.findall(r"[\d,]+", cell) for cell in cells)
    warps = int(value[0]), int(score[0]), int(softmax[0]), int(copy[0])
    assert warps == (g.value_warps, g.score_warps, g.softmax_warps, g.copy_warps)
    assert sum(warps) == g.threads // WARP
    assert (int(value[1]), int(softmax[1])) == (g.m_tiles, g.softmax_tiles)
    assert [int(size.replace(",", "")) for (size,) in sizes] == [g.max_registers, g.stages, g.shared.total]


def test_every_column_is_one_value_warps(g):
    """Shares are equal, except that the last may end behind the last column."""
    share = M_TILE * g.m_tiles
    ends = [min(g.value_columns, share * (me + 1)) for me in range(g.value_warps)]
    widths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert sum(widths) == g.value_columns
    assert widths[:-1] == [share] * (g.value_warps - 1)
    assert 0 < widths[-1] <= share
    assert widths[-1] % M_TILE == 0
    assert g.uneven_columns == (widths[-1] < share)


def test_what_is_multiplied_and_dropped_lies_in_the_same_row(g):
    """Behind its last column a value warp reads rope columns, which the copy has written, and nothing further."""
    assert M_TILE * g.m_tiles * g.value_warps <= g.value_columns + g.rope_columns


def test_six_value_warps_have_uneven_shares():
    forms = [g for g in FORMS if g.value_warps == 6]
    assert {g.cluster for g in forms} == {1, 2}
    for g in forms:
        assert g.uneven_columns
        assert (g.m_tiles, g.value_columns // M_TILE % g.m_tiles) == ((3, 1) if g.cluster == 2 else (6, 2))


def row_tiles(g):
    """Row tiles of each softmax warp, by its block and its number."""
    return {
        (rank, me): range(g.cluster * me + rank, g.n_tiles, g.softmax_stride)
        for rank in range(g.cluster)
        for me in range(g.softmax_warps)
    }


def test_every_row_tile_is_one_softmax_warps_of_the_block_whose_turn_it_is(g):
    tiles = row_tiles(g)
    assert sorted(tile for mine in tiles.values() for tile in mine) == list(range(g.n_tiles))
    assert all(tile % g.cluster == rank for (rank, _), mine in tiles.items() for tile in mine)
    assert max(sum(len(tiles[rank, me]) for me in range(g.softmax_warps)) for rank in range(g.cluster)) == g.own_tiles


def test_every_block_of_a_cluster_has_a_row_tile(g):
    """Its partner's scores wait for those that it sends: the ring of scores relies on it."""
    assert all(row_tiles(g)[rank, 0] for rank in range(g.cluster))


def test_at_most_one_row_tile_of_a_softmax_warp_is_not_there(g):
    """Its operations know one that may not be there: the last."""
    counts = {len(mine) for mine in row_tiles(g).values()}
    assert max(counts) == g.softmax_tiles
    assert min(counts) >= g.softmax_tiles - 1


def test_the_lanes_of_a_warp_do_for_a_note_and_for_its_flags(g):
    """A softmax warp posts eight lanes a row tile and a flag behind them; a value warp reads a flag a lane."""
    assert 8 * g.softmax_tiles + 1 <= WARP
    assert g.softmax_stride <= WARP
    assert g.note_bytes == 4 * WARP * g.softmax_stride


def test_no_note_or_weight_that_a_partner_may_send_is_too_few(g):
    """A softmax warp posts tile t once its value warps are done with t - WEIGHTS_AHEAD, so the partner's softmax warps
    have posted that, for which their value warps were done with WEIGHTS_AHEAD tiles before. One request likewise."""
    assert g.weight_buffers >= g.cluster * WEIGHTS_AHEAD
    assert g.inverse_buffers >= g.cluster


def test_every_score_warp_has_whole_row_tiles_and_whole_loads_of_columns(g):
    """Queries are loaded 32 columns at a time."""
    assert g.groups * g.group_tiles == g.n_tiles
    assert g.k_groups * g.warp_k_steps == g.k_steps
    assert g.warp_k_steps % 2 == 0
    assert g.value_columns % 32 == g.rope_columns % 32 == 0


def test_registers_of_all_warps_fit_and_no_more_would(g):
    """16,384 a quarter of a multiprocessor, which runs every fourth warp; given out in eights."""
    warps = -(-g.threads // WARP // 4)
    assert g.max_registers % 8 == 0
    assert warps * WARP * g.max_registers <= 16_384 < warps * WARP * (g.max_registers + 8)
