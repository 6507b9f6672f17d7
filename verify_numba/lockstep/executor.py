"""Runs the blocks of one cluster side by side, a greenlet a warp, switching only where a warp waits.

Without a seed, warps take turns in a fixed order and asynchronous copies land at once. With a seed, another warp may
run at every operation that touches shared memory or a barrier, and some warps are drawn to be much slower than
others. In adversarial mode the destination of a copy is poisoned when the copy is issued, and its data and its
completion come separately: at random moments, or only once every warp waits. A missing wait then shows as a NaN.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

from verify_numba.lockstep.barriers import Barrier, CountedBarrier, MBarrier
from verify_numba.lockstep.errors import DeadlockError, LockstepError, MemoryFault, ProtocolError
from verify_numba.lockstep.memory import GlobalMemory, SharedMemory

LANDING_RATES = (0.0, 0.02, 0.3)
"""Chances that something in flight advances between two switches; one is drawn for each cluster."""
SLOWNESS = 4.0
"""The slowest warps are drawn e to this power times less often than the fastest."""


@dataclass(frozen=True)
class Dispatch:
    """One launch, as every block sees it."""

    kernel: Callable[..., None]
    args: tuple[Any, ...]
    grid: tuple[int, int]
    warps: int
    shared_bytes: int
    memory: GlobalMemory


@dataclass
class Delivery:
    """A copy under way: its data lands, then it tells its barrier."""

    label: str
    block: Block
    """Whose shared memory it writes."""
    steps: deque[Callable[[], None]]


@dataclass(eq=False)
class Block:
    """One block: where it is in the grid, and its shared memory and barriers."""

    x: int
    y: int
    shared: SharedMemory
    cluster: Cluster
    all_warps: CountedBarrier
    mbarriers: dict[int, MBarrier] = field(default_factory=dict)
    named: dict[str, CountedBarrier] = field(default_factory=dict)

    def init_mbarrier(self, offset: int, count: int, label: str) -> None:
        if offset % 8:
            raise MemoryFault(f"mbarrier {label} at shared byte {offset}, which is not a multiple of 8")
        self.shared.view(offset, np.uint64, (1,))
        self.mbarriers[offset] = MBarrier(f"{label} at shared byte {offset} of block ({self.x}, {self.y})", count)

    def mbarrier(self, offset: int) -> MBarrier:
        barrier = self.mbarriers.get(offset)
        if barrier is None:
            raise ProtocolError(f"no barrier was initialised at shared byte {offset} of block ({self.x}, {self.y})")
        return barrier

    def named_barrier(self, name: str, warps: int) -> CountedBarrier:
        """The barrier that `warps` warps of the block share under this name."""
        if name not in self.named:
            self.named[name] = CountedBarrier(f"the {name} barrier of block ({self.x}, {self.y})", warps)
        return self.named[name]


class Warp(greenlet):
    """One warp; inside a kernel `current()` is the one that runs."""

    def __init__(self, block: Block, index: int, hub: greenlet) -> None:
        super().__init__(self._body, hub)
        self.block = block
        self.index = index
        self.cluster = block.cluster
        self.memory = block.cluster.dispatch.memory
        self.waiting_for: tuple[Barrier, str] | None = None

    def __str__(self) -> str:
        return f"warp {self.index} of block ({self.block.x}, {self.block.y})"

    def _body(self) -> None:
        launch = self.cluster.dispatch
        # Context variables, NumPy's error state among them, are a greenlet's own.
        with np.errstate(all="ignore"):
            try:
                launch.kernel(*launch.args)
            except LockstepError as error:
                raise type(error)(f"{self}: {error}") from error
            except Exception as error:
                error.add_note(f"in {self}")
                raise

    def wake(self) -> None:
        self.waiting_for = None
        self.cluster.ready.append(self)

    def preempt(self) -> None:
        """A point at which another warp may run."""
        if self.cluster.rng is not None:
            self.cluster.ready.append(self)
            self.cluster.hub.switch()

    def wait_mbarrier(self, offset: int, parity: int) -> None:
        self.preempt()
        barrier = self.block.mbarrier(offset)
        while not barrier.passed(parity):
            self._park(barrier, f" for parity {parity}")

    def wait_phase(self, barrier: CountedBarrier, phase: int) -> None:
        while barrier.phase <= phase:
            self._park(barrier, "")

    def sync(self, barrier: CountedBarrier) -> None:
        self.preempt()
        self.wait_phase(barrier, barrier.arrive(self))

    def _park(self, barrier: Barrier, what: str) -> None:
        self.waiting_for = (barrier, what)
        barrier.waiters.append(self)
        self.cluster.hub.switch()


class Cluster:
    """The blocks of one cluster, and whose turn it is."""

    def __init__(
        self, dispatch: Dispatch, blocks: list[tuple[int, int]], rng: random.Random | None, adversarial: bool
    ) -> None:
        self.dispatch, self.rng, self.adversarial = dispatch, rng, adversarial
        self.hub = getcurrent()
        self.in_flight: list[Delivery] = []
        self.ready: deque[Warp] = deque()
        self.all_warps = CountedBarrier("the cluster barrier", len(blocks) * dispatch.warps)
        self.blocks = [
            Block(x, y, SharedMemory(dispatch.shared_bytes), self,
                  CountedBarrier(f"the barrier of block ({x}, {y})", dispatch.warps))
            for x, y in blocks
        ]  # fmt: skip
        self.warps = [Warp(block, index, self.hub) for block in self.blocks for index in range(dispatch.warps)]
        self._weight = {warp: 1.0 for warp in self.warps}
        self._landing_rate = 0.0
        if rng is not None:
            self._weight = {warp: np.exp(-SLOWNESS * rng.random()) for warp in self.warps}
            self._landing_rate = rng.choice(LANDING_RATES)

    def run(self) -> None:
        """Runs every warp to its end.

        Raises:
            LockstepError: see its subclasses.
        """
        try:
            self.ready.extend(self.warps)
            while self.ready or self.in_flight:
                if self.in_flight and (not self.ready or (self.rng and self.rng.random() < self._landing_rate)):
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

    def deliver(self, label: str, block: Block, poison: Callable[[], None], *steps: Callable[[], None]) -> None:
        """Starts an asynchronous write to `block`; `poison` spoils its destination, undefined until it lands."""
        if self._exited(block):
            raise ProtocolError(f"{label} is sent to block ({block.x}, {block.y}), which has exited")
        if not self.adversarial:
            for step in steps:
                step()
            return
        poison()
        self.in_flight.append(Delivery(label, block, deque(steps)))

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
                    raise ProtocolError(f"{warp}, the last of its block, exited while {delivery.label} is in flight")

    def _exited(self, block: Block) -> bool:
        return all(warp.dead for warp in self.warps if warp.block is block)

    def _check_end(self) -> None:
        waiting = [warp for warp in self.warps if not warp.dead]
        if waiting:
            lines = (f"  {warp}: waits at {at[0]}{at[1]}" for warp in waiting if (at := warp.waiting_for))
            raise DeadlockError("\n".join(["no warp can run", *lines]))
        for block in self.blocks:
            for counted in (block.all_warps, self.all_warps, *block.named.values()):
                if counted.arrived:
                    raise ProtocolError(f"the launch ended amid a phase of {counted}")
            for mbarrier in block.mbarriers.values():
                if mbarrier.tx:
                    raise ProtocolError(f"the launch ended while bytes are pending at {mbarrier}")


def current() -> Warp:
    """The warp that runs.

    Raises:
        LockstepError: no launch is under way on this thread.
    """
    warp = getcurrent()
    if not isinstance(warp, Warp):
        raise LockstepError("this operation works only inside a kernel that run_kernel runs")
    return warp
