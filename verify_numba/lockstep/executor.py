"""Runs the blocks of one cluster side by side, switching only where a warp waits.

Without a seed, warps take turns in a fixed order and asynchronous copies land at once. With a seed, another
warp may run at every operation that touches shared memory or a barrier, and some warps are drawn to be much
slower than others. In adversarial mode the destination of a copy is poisoned when the copy is issued, and its
data and its completion come separately: at random moments, or only once every warp waits. A missing wait then
shows as a NaN.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from greenlet import getcurrent

from verify_numba.lockstep.barriers import CountedBarrier
from verify_numba.lockstep.errors import DeadlockError, ProtocolError
from verify_numba.lockstep.machine import Block, Delivery, Warp
from verify_numba.lockstep.memory import GlobalMemory, SharedMemory
from verify_numba.lockstep.races import Cast, Shadow

LANDING_RATES = (0.0, 0.02, 0.3)
"""Chances that something in flight advances between two switches; one is drawn for each cluster."""
SLOWNESS = 4.0
"""The slowest warps are drawn e to this power times less often than the fastest."""
ASYNC_WRITERS = 256
"""Most mbarriers of a cluster that asynchronous copies complete at."""


@dataclass(frozen=True)
class Dispatch:
    """One launch, as every block sees it."""

    kernel: Callable[..., None]
    args: tuple[Any, ...]
    grid: tuple[int, int]
    warps: int
    shared_bytes: int
    memory: GlobalMemory
    known: dict[Any, Any] = field(default_factory=dict)
    """What operations derived from memory that no kernel writes."""


@dataclass(frozen=True)
class Schedule:
    """How a launch runs; see `run_kernel`."""

    rng: random.Random | None
    adversarial: bool
    check_races: bool


class Cluster:
    """The blocks of one cluster, and whose turn it is."""

    def __init__(self, dispatch: Dispatch, blocks: list[tuple[int, int]], schedule: Schedule) -> None:
        self.dispatch, self.rng, self.adversarial = dispatch, schedule.rng, schedule.adversarial
        self.hub = getcurrent()
        self.in_flight: list[Delivery] = []
        self.ready: deque[Warp] = deque()
        warps = dispatch.warps
        self.all_warps = CountedBarrier("the cluster barrier", len(blocks) * warps)
        self.cast = Cast(len(blocks) * warps, ASYNC_WRITERS)
        self.blocks = [
            Block(
                x,
                y,
                SharedMemory(dispatch.shared_bytes),
                self,
                CountedBarrier(f"the barrier of block ({x}, {y})", warps),
                Shadow(self.cast, rank * warps, warps, dispatch.shared_bytes)
                if schedule.check_races
                else None,
            )
            for rank, (x, y) in enumerate(blocks)
        ]
        self.warps = [
            Warp(
                block,
                index,
                self.hub,
                self.cast.add(f"warp {index} of block ({block.x}, {block.y})")
                if schedule.check_races
                else None,
            )
            for block in self.blocks
            for index in range(warps)
        ]
        self._weight: dict[Warp, float] = {}
        self._landing_rate = 0.0
        if self.rng is not None:
            self._weight = {warp: float(np.exp(-SLOWNESS * self.rng.random())) for warp in self.warps}
            self._landing_rate = self.rng.choice(LANDING_RATES)

    def run(self) -> None:
        """Runs every warp to its end.

        Raises:
            LockstepError: see its subclasses.
        """
        try:
            self.ready.extend(self.warps)
            while self.ready or self.in_flight:
                if self.in_flight and (not self.ready or self._lands()):
                    self._advance()
                    continue
                warp = self._next()
                warp.switch()
                if warp.dead:
                    self._check_exit(warp)
            self._check_end()
        finally:
            for warp in self.warps:
                if not warp.dead:
                    warp.throw()

    def deliver(self, delivery: Delivery, poison: Callable[[], None]) -> None:
        """Starts an asynchronous write; `poison` spoils the destination, undefined until it lands."""
        block = delivery.block
        if self._exited(block):
            raise ProtocolError(f"{delivery.label} is sent to block ({block.x}, {block.y}), which has exited")
        if self.adversarial:
            poison()
            self.in_flight.append(delivery)
        else:
            for step in delivery.steps:
                step()

    def _lands(self) -> bool:
        return self.rng is not None and self.rng.random() < self._landing_rate

    def _next(self) -> Warp:
        if self.rng is None:
            return self.ready.popleft()
        warp = self.rng.choices(self.ready, [self._weight[warp] for warp in self.ready])[0]
        self.ready.remove(warp)
        return warp

    def _advance(self) -> None:
        delivery = self.in_flight[0] if self.rng is None else self.rng.choice(self.in_flight)
        delivery.steps.popleft()()
        if not delivery.steps:
            self.in_flight.remove(delivery)

    def _check_exit(self, warp: Warp) -> None:
        for barrier in (warp.block.all_warps, self.all_warps):
            if barrier.waiters and warp not in barrier.arrived:
                raise ProtocolError(f"{warp} exited while {barrier.waiters[0]} waits at {barrier}")
        if self.in_flight and self._exited(warp.block):
            for delivery in self.in_flight:
                if delivery.block is warp.block:
                    raise ProtocolError(
                        f"{warp}, the last of its block, exited while {delivery.label} is in flight"
                    )

    def _exited(self, block: Block) -> bool:
        return all(warp.dead for warp in self.warps if warp.block is block)

    def _check_end(self) -> None:
        waiting = [warp for warp in self.warps if not warp.dead]
        if waiting:
            lines = (f"  {warp} waits at {warp.waiting_for}" for warp in waiting)
            raise DeadlockError("\n".join(["no warp can run:", *lines]))
        for block in self.blocks:
            for counted in (block.all_warps, self.all_warps, *block.named.values()):
                if counted.arrived:
                    raise ProtocolError(f"the launch ended amid a phase of {counted}")
            for mbarrier in block.mbarriers.values():
                if mbarrier.tx:
                    raise ProtocolError(f"the launch ended while bytes are pending at {mbarrier}")
