"""Small pools in known and in random states, for the tests of defragmentation."""

from __future__ import annotations

from itertools import islice

import numpy as np
from numpy.typing import NDArray

from harness.defrag_backend import Backend, ModelBackend, ServerShape
from harness.defrag_sim import Server
from harness.defrag_trace import drawn
from sglang_glue.defrag.controller import Controller
from sglang_glue.defrag.planner import PlannerSettings
from sglang_glue.defrag.snapshot import Snapshot, Unit

SHAPE = ServerShape(slots=2048, context=512, running=6, chunk=256, draft=5, block=0)
EAGER = PlannerSettings(budget_bytes=96 * 48, slot_bytes=48, piece=32, low=64.0, high=128.0)
"""Relocates at every look: nothing is ever contiguous enough."""


def units_of(*slots: list[int], readers: int = 1) -> tuple[Unit, ...]:
    return tuple(Unit(np.array(s, np.int64), readers, -1, f"unit {i}") for i, s in enumerate(slots))


def snapshot_of(size: int, *slots: list[int], readers: int = 1) -> Snapshot:
    """A pool whose units are these slot lists, read by one request each; the rest is free."""
    units = units_of(*slots, readers=readers)
    held = np.concatenate([u.slots for u in units]) if units else np.empty(0, np.int64)
    free = np.setdiff1d(np.arange(1, size + 1), held)
    return Snapshot(size, free, units, tuple(u.slots for u in units))


def scattered(seed: int, size: int = 400, requests: int = 6, fill: float = 0.7) -> Snapshot:
    """Random slots dealt to requests, some of which share the first one as their prefix."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(size)[: int(size * fill)] + 1
    cuts = np.sort(rng.integers(0, slots.size, requests - 1))
    parts = [p for p in np.split(slots, cuts) if p.size]
    units = [Unit(parts[0], 3, -1, "prefix")]
    units += [
        Unit(p, int(rng.integers(0, 3)), int(rng.integers(-1, 1)), f"unit {i}")
        for i, p in enumerate(parts[1:])
    ]
    free = np.setdiff1d(np.arange(1, size + 1), slots)
    rows = [np.concatenate((parts[0], u.slots)) if u.follows == 0 else u.slots for u in units if u.readers]
    return Snapshot(size, free, tuple(units), tuple(rows))


def moved(snapshot: Snapshot, table: NDArray[np.int64], free: NDArray[np.int64]) -> Snapshot:
    """The snapshot with every slot under its new name."""
    units = tuple(Unit(table[u.slots], u.readers, u.follows, u.name) for u in snapshot.units)
    return Snapshot(snapshot.size, free, units, tuple(table[r] for r in snapshot.rows))


def server(
    tier: str,
    seed: int = 0,
    *,
    shape: ServerShape = SHAPE,
    backend: Backend | None = None,
    requests: int | None = None,
) -> Server:
    """A small simulated server under load; ``requests`` limits the arrivals."""
    controller = Controller(EAGER, 4) if tier == "relocate" else None
    arrivals = islice(drawn(seed, shape.context, 0.3), requests)
    return Server(shape, backend or ModelBackend(shape, tier), arrivals, seed=seed, controller=controller)
