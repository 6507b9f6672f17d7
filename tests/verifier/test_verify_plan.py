"""Laws of the plan: integers alone, so they hold for GPUs that nobody has at hand."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from verify_numba import VerifyInputError, make_plan
from verify_numba.dims import D_V
from verify_numba.geometry import CLUSTER_FORMS, SINGLE_FORMS, SM120_SHARED_BYTES
from verify_numba.gpu.cache_key import cache_key
from verify_numba.gpu.spec import KernelSpec
from verify_numba.variants import all_specs, merge_spec, verify_spec

FORMS = (*CLUSTER_FORMS, *SINGLE_FORMS)
GPUS = {
    "A10": ((8, 6), 72),
    "A100": ((8, 0), 108),
    "L40S": ((8, 9), 142),
    "H200": ((9, 0), 132),
    "a slice of an H200": ((9, 0), 16),
    "RTX 5090": ((12, 0), 170),
    "RTX PRO 6000": ((12, 0), 188),
}
BOUNDED = 2**31 - 1, 65_535
"""Most blocks of a grid in x and y."""


@pytest.fixture(params=GPUS)
def gpu(request):
    cc, sm_count = GPUS[request.param]
    return {"cc": cc, "sm_count": sm_count}


def test_every_head_and_draft_count_has_a_plan(gpu):
    for H, T in itertools.product(range(1, 129), range(1, 65)):
        plan = make_plan(max_bs=8, T=T, H=H, **gpu)
        rows = T * H
        assert plan.geometry in (CLUSTER_FORMS if gpu["cc"] >= (9, 0) else SINGLE_FORMS)
        assert (plan.row_blocks - 1) * plan.geometry.rows < rows <= plan.row_capacity
        assert plan.row_capacity == plan.row_blocks * plan.geometry.rows
        assert plan.grid == (plan.workers * plan.geometry.cluster, plan.row_blocks)
        assert all(1 <= n <= most for n, most in zip(plan.grid, BOUNDED, strict=True))
        assert 1 <= plan.merge_blocks <= BOUNDED[0]
        assert 8 * plan.merge_row_tiles >= rows > 8 * (plan.merge_row_tiles - 1)
        assert 1 <= plan.workers * plan.geometry.cluster <= gpu["sm_count"]
        assert plan.part_o_bytes == (plan.workers + 8) * plan.row_capacity * D_V * 4
        assert plan.workspace_bytes == plan.part_o_bytes + plan.part_lse_bytes < 2**31


@pytest.mark.parametrize(
    ("T", "H", "blocks"),
    [
        (2, 8, (16, 1)), (17, 1, (24, 1)), (3, 8, (24, 1)), (25, 1, (48, 1)), (6, 8, (48, 1)), (7, 7, (72, 1)),
        (9, 8, (72, 1)), (10, 8, (48, 2)), (13, 8, (72, 2)), (28, 8, (72, 4)), (64, 128, (72, 114)),
    ],
    ids=str,
)  # fmt: skip
def test_rows_are_cut_into_the_blocks_that_take_least_time(T, H, blocks):
    """By the times that were measured: 48 rows take 1.3 times as long as 24, 72 rows 1.5 times."""
    plan = make_plan(max_bs=1, T=T, H=H, cc=(9, 0), sm_count=132)
    assert (plan.geometry.rows, plan.row_blocks) == blocks


def test_the_workspace_of_one_rank_is_small(gpu):
    plan = make_plan(max_bs=8, T=9, H=8, **gpu)
    assert plan.workspace_bytes < 64 * 2**20


@pytest.mark.parametrize("g", FORMS, ids=lambda g: g.name)
def test_every_form_fits_the_smallest_shared_memory(g):
    assert 0 < g.shared.total <= SM120_SHARED_BYTES == 101_376


@pytest.mark.parametrize("g", FORMS, ids=lambda g: g.name)
def test_every_form_is_a_kernel(g):
    spec = verify_spec(g)
    assert isinstance(spec, KernelSpec)
    assert (spec.cluster, spec.threads, spec.smem_bytes) == (g.cluster, g.threads, g.shared.total)
    assert spec.threads <= 1024
    assert spec.max_registers * spec.threads <= 65_536
    assert spec.used_on((12, 0))
    assert spec.used_on((8, 9)) == (g.cluster == 1)


def test_kernels_have_names_of_their_own():
    names = [spec.name for spec in all_specs()]
    assert len(set(names)) == len(names) == len(FORMS) + 2
    assert merge_spec(True) is merge_spec(True)


def test_few_kernels_serve_all_shapes(gpu):
    """One compilation a form, however many draft and head counts there are."""
    used = {make_plan(max_bs=8, T=T, H=H, **gpu).geometry for T in range(1, 65) for H in (1, 2, 4, 8, 16, 64, 128)}
    assert used <= set(FORMS)
    assert len(used) <= 4


def test_max_bs_changes_nothing_but_the_workspace(gpu):
    small, large = (make_plan(max_bs=bs, T=9, H=8, **gpu) for bs in (1, 64))
    differ = {f.name for f in fields(small) if getattr(small, f.name) != getattr(large, f.name)}
    assert differ == {"max_bs"}
    assert large.part_slots - small.part_slots == 63


@pytest.mark.parametrize("nsplit", [1, 2, 7, 64, 1024])
@pytest.mark.parametrize("form", ["auto", "cluster", "single"])
def test_overrides_are_kept(nsplit, form):
    plan = make_plan(max_bs=4, T=9, H=8, cc=(9, 0), sm_count=132, nsplit=nsplit, form=form)
    assert plan.workers == nsplit
    assert plan.min_tiles == 1
    assert plan.form == ("single" if form == "single" else "cluster")
    assert plan.grid[0] == nsplit * plan.geometry.cluster


def test_the_form_follows_the_gpu():
    for cc, form in (((8, 0), "single"), ((8, 9), "single"), ((9, 0), "cluster"), ((12, 0), "cluster")):
        assert make_plan(max_bs=1, T=9, H=8, cc=cc, sm_count=100).form == form


@pytest.mark.parametrize("g", FORMS, ids=lambda g: g.name)
def test_lanes_that_arrive_for_themselves_are_a_kernel_of_its_own(g):
    """Of a name and so a place in the cache of its own, with as much shared memory and as many registers."""
    lanes = replace(g, lanes_arrive=True)
    plain, other = verify_spec(g), verify_spec(lanes)
    differ = {f.name for f in fields(plain) if getattr(plain, f.name) != getattr(other, f.name)}
    assert differ == {"name", "build"}
    assert cache_key(plain, (9, 0)) != cache_key(other, (9, 0))
    assert (g.arrivals(g.value_warps), lanes.arrivals(g.value_warps)) == (g.value_warps, 32 * g.value_warps)
    assert lanes.shared == g.shared


def test_a_plan_differs_by_lanes_arrive_in_nothing_else():
    plain, lanes = (make_plan(max_bs=4, T=9, H=8, cc=(9, 0), sm_count=132, lanes_arrive=x) for x in (False, True))
    assert lanes == replace(plain, geometry=replace(plain.geometry, lanes_arrive=True))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_bs", 0, "from 1 to 65535"),
        ("max_bs", 65_536, "from 1 to 65535"),
        ("T", 0, "from 1 to 64"),
        ("T", 65, "from 1 to 64"),
        ("T", 9.0, "an integer"),
        ("H", True, "an integer"),
        ("H", 0, "from 1 to 128"),
        ("H", 129, "from 1 to 128"),
        ("H", "8", "an integer"),
        ("nsplit", 0, "from 1 to 1024"),
        ("nsplit", 1025, "from 1 to 1024"),
        ("form", "pair", "'auto', 'cluster' or 'single'"),
        ("form", None, "'auto', 'cluster' or 'single'"),
        ("lanes_arrive", 1, "True or False"),
    ],
)
def test_what_cannot_be_planned_is_named(field, value, expected):
    sizes = {"max_bs": 8, "T": 9, "H": 8, "cc": (9, 0), "sm_count": 132, field: value}
    with pytest.raises(VerifyInputError) as caught:
        make_plan(**sizes)
    assert caught.value.field == field
    assert f"{field} is " in str(caught.value)
    assert expected in str(caught.value)


def test_clusters_need_a_gpu_that_has_them():
    with pytest.raises(VerifyInputError, match="form is 'cluster', expected 'single' on compute capability 8.9"):
        make_plan(max_bs=8, T=9, H=8, cc=(8, 9), sm_count=142, form="cluster")


def test_a_plan_is_frozen_whole_and_printable():
    plan = make_plan(max_bs=8, T=9, H=8, cc=(9, 0), sm_count=132)
    with pytest.raises(FrozenInstanceError):
        plan.workers = 3
    own = [getattr(plan, f.name) for f in fields(plan) if f.name != "geometry"]
    assert all(type(value) is int for value in own)
    assert plan == make_plan(max_bs=8, T=9, H=8, cc=(9, 0), sm_count=132)
    assert str(plan).startswith(f"{plan.geometry.name}: {plan.workers} workers")
