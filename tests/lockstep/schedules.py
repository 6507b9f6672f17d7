"""Schedules made to find faults: roles that come last of all, waits that are left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cases import SyntheticBatch
from tests.lockstep.support import Result, run
from verify_numba.geometry import Geometry
from verify_numba.lockstep import LockstepError
from verify_numba.lockstep.control_ops import barrier_rings
from verify_numba.lockstep.executor import Cluster
from verify_numba.lockstep.machine import Warp


def role_of(g: Geometry, warp: Warp) -> str:
    if warp.index < g.value_warps:
        return "value"
    if warp.index < g.first_softmax_warp:
        return "score"
    return "softmax" if warp.index < g.first_copy_warp else "copy"


@contextmanager
def without_wait(g: Geometry, ring: str, role: str) -> Iterator[None]:
    """Takes one role's waits for one ring of barriers away."""
    first, length, _ = barrier_rings(g)[ring]
    bars = range(first, first + 8 * length, 8)
    wait = Warp.wait_mbarrier

    def careless(warp: Warp, bar: int, parity: int) -> None:
        if bar not in bars or role_of(g, warp) != role:
            wait(warp, bar, parity)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Warp, "wait_mbarrier", careless)
        yield


@contextmanager
def starving(g: Geometry, role: str, rank: int) -> Iterator[None]:
    """One role of one block of a cluster runs only while every other warp waits; needs a seed."""

    def draw(cluster: Cluster) -> Warp:
        fed = [w for w in cluster.ready if w.block.x % g.cluster != rank or role_of(g, w) != role]
        assert cluster.rng is not None
        warp = cluster.rng.choice(fed or list(cluster.ready))
        cluster.ready.remove(warp)
        return warp

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "_next", draw)
        yield


def is_noticed(
    batch: SyntheticBatch, g: Geometry, expected: Result, late: str, rank: int, seed: int, **options: Any
) -> bool:
    """Whether a run in which one role comes last, and copies are garbage until they must land, goes wrong."""
    with starving(g, late, rank):
        try:
            found = run(batch, g, workers=1, seed=seed, adversarial=True, **options)
        except LockstepError:
            return True
    return not found.same_bits(expected)
