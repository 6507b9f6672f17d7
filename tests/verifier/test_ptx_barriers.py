"""Barriers as PTX sets them up and arrives at them: as many arrivals a phase as the CPU executor counts warps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from verify_numba.geometry import CLUSTER_FORMS, SINGLE_FORMS, WARP, Geometry
from verify_numba.gpu.spec import CLUSTER_MIN_CC
from verify_numba.lockstep.control_ops import barrier_rings

cuda = pytest.importorskip("numba.cuda", reason="compiling kernels needs numba-cuda")

FORMS = pytest.mark.parametrize("g", (*CLUSTER_FORMS, *SINGLE_FORMS), ids=lambda g: g.name)
INIT = re.compile(r"setp\.lt\.s32 p, %r\d+, (\d+); @p mbarrier\.init\.shared\.b64 \[%r\d+\+(\d+)\], (\d+);")
ARRIVE = re.compile(r"\{\.reg[^}]*mbarrier\.arrive\.[^}]*\}")


def compiled(g: Geometry) -> str:
    """PTX of a kernel that sets up the barriers of `g` and arrives at one."""
    from numba import types

    from verify_numba.ptx.control import control_ops

    ops = control_ops(g)
    init_barriers, arrive = ops.init_barriers, ops.arrive

    def kernel(base):
        init_barriers(base)
        arrive(base)

    cc = CLUSTER_MIN_CC if g.cluster == 2 else (8, 0)
    ptx, _ = cuda.compile(kernel, (types.int32,), cc=cc, output="ptx", device=False, abi="numba")
    return ptx if isinstance(ptx, str) else ptx.decode()


def rings(ptx: str) -> set[tuple[int, ...]]:
    """(first offset, length, arrivals of a phase) of each ring that is set up."""
    return {(int(offset), int(length), int(arrivals)) for length, offset, arrivals in INIT.findall(ptx)}


@FORMS
def test_one_lane_arrives_for_its_warp_once_all_lanes_are_there(g):
    ptx = compiled(g)
    assert rings(ptx) == set(barrier_rings(g).values())
    (arrive,) = ARRIVE.findall(ptx)
    assert re.search(r"bar\.warp\.sync -1; setp\.eq\.s32 p, %r\d+, 0; @p mbarrier\.arrive", arrive)


@FORMS
def test_every_lane_arrives_for_itself_where_it_is_told_to(g):
    """All but what is no warp's arrival: copies, a lane each anyhow, and the announcement of the partner's bytes."""
    ptx = compiled(replace(g, lanes_arrive=True))
    expected = dict(barrier_rings(g))
    for name, (offset, length, arrivals) in barrier_rings(g).items():
        if name != "full":
            announced = int(name == "scores_full" and g.cluster == 2)
            expected[name] = (offset, length, WARP * (arrivals - announced) + announced)
    assert rings(ptx) == set(expected.values())
    (arrive,) = ARRIVE.findall(ptx)
    assert "@p" not in arrive and "bar.warp.sync" not in arrive
