"""A block, a warp, and what a warp does that concerns others: wait, arrive, share memory, copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent, greenlet
from numpy.typing import DTypeLike, NDArray

from verify_numba.lockstep.barriers import Barrier, CountedBarrier, MBarrier
from verify_numba.lockstep.errors import LockstepError, MemoryFault, ProtocolError, RaceError
from verify_numba.lockstep.memory import POISON, SharedMemory
from verify_numba.lockstep.races import Actor, Clock, Region, Shadow

if TYPE_CHECKING:
    from verify_numba.lockstep.executor import Cluster


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
    shadow: Shadow | None
    mbarriers: dict[int, MBarrier] = field(default_factory=dict)
    named: dict[str, CountedBarrier] = field(default_factory=dict)

    def init_mbarrier(self, offset: int, count: int, label: str) -> None:
        if offset % 8 or not 0 <= offset <= self.shared.data.size - 8:
            raise MemoryFault(
                f"mbarrier {label} cannot be at shared byte {offset} of {self.shared.data.size}"
            )
        self.mbarriers[offset] = MBarrier(f"{label} at byte {offset} of block ({self.x}, {self.y})", count)

    def mbarrier(self, offset: int) -> MBarrier:
        barrier = self.mbarriers.get(offset)
        if barrier is None:
            raise ProtocolError(
                f"no mbarrier was set up at shared byte {offset} of block ({self.x}, {self.y})"
            )
        return barrier

    def named_barrier(self, name: str, warps: int) -> CountedBarrier:
        """The barrier that `warps` warps of the block share under this name."""
        if name not in self.named:
            self.named[name] = CountedBarrier(f"the {name} barrier of block ({self.x}, {self.y})", warps)
        return self.named[name]


class Warp(greenlet):  # type: ignore[misc]
    """One warp; inside a kernel `current()` is the one that runs."""

    def __init__(self, block: Block, index: int, hub: greenlet, actor: Actor | None) -> None:
        super().__init__(self._body, hub)
        self.block = block
        self.index = index
        self.cluster = block.cluster
        self.memory = block.cluster.dispatch.memory
        self.waiting_for = ""
        self._actor = actor

    def __str__(self) -> str:
        return f"warp {self.index} of block ({self.block.x}, {self.block.y})"

    def _body(self) -> None:
        dispatch = self.cluster.dispatch
        # Context variables, NumPy's error state among them, are a greenlet's own.
        with np.errstate(all="ignore"):
            try:
                dispatch.kernel(*dispatch.args)
            except RaceError:
                raise  # it names the warps of both accesses
            except LockstepError as error:
                raise type(error)(f"{self}: {error}") from error
            except Exception as error:
                error.add_note(f"in {self}")
                raise

    def wake(self) -> None:
        self.waiting_for = ""
        self.cluster.ready.append(self)

    def wait_mbarrier(self, offset: int, parity: int) -> None:
        self._preempt()
        barrier = self.block.mbarrier(offset)
        while not barrier.passed(parity):
            self._park(barrier, f"{barrier}, for parity {parity}")
        self._acquire(barrier)

    def arrive_mbarrier(self, offset: int, expect: int = 0) -> None:
        """One arrival, which announces `expect` bytes."""
        self._preempt()
        barrier = self.block.mbarrier(offset)
        barrier.expect(expect)
        barrier.arrive(1, self._release())

    def wait_phase(self, barrier: CountedBarrier, phase: int) -> None:
        while barrier.phase <= phase:
            self._park(barrier, str(barrier))
        self._acquire(barrier)

    def arrive(self, barrier: CountedBarrier) -> int:
        self._preempt()
        return barrier.arrive(self, self._release())

    def sync(self, barrier: CountedBarrier) -> None:
        self.wait_phase(barrier, self.arrive(barrier))

    def read(
        self, offset: int, dtype: DTypeLike, shape: tuple[int, ...], stride: int | None = None
    ) -> NDArray[Any]:
        """A view of the block's shared memory, to be read before the warp does anything else."""
        self._preempt()
        view = self.block.shared.view(offset, dtype, shape, stride)
        if self._actor and self.block.shadow:
            self.block.shadow.read(self._actor, _region(offset, view))
        return view

    def write(
        self, offset: int, dtype: DTypeLike, shape: tuple[int, ...], stride: int | None = None
    ) -> NDArray[Any]:
        """The same, to be written (and read)."""
        self._preempt()
        view = self.block.shared.view(offset, dtype, shape, stride)
        if self._actor and self.block.shadow:
            self.block.shadow.write(self._actor, _region(offset, view))
        return view

    def write_async(
        self,
        block: Block,
        offset: int,
        shape: tuple[int, ...],
        data: Callable[[], NDArray[Any]],
        barrier: MBarrier,
        *,
        stride: int | None = None,
        arrivals: int = 0,
    ) -> None:
        """Starts a write of bytes to this or the partner block, which tells `barrier` when it is complete.

        It tells the number of bytes, or, with `arrivals`, so many arrivals instead.
        """
        self._preempt()
        target = block.shared.view(offset, np.uint8, shape, stride)
        clock: Clock | None = None
        if self._actor and block.shadow:
            writer = self.cluster.cast.writer(barrier.label, self._actor)
            block.shadow.write(writer, _region(offset, target))
            clock = writer.clock

        def land() -> None:
            target[:] = data()

        def complete() -> None:
            if arrivals:
                barrier.arrive(arrivals, clock)
            else:
                barrier.complete(target.nbytes, clock)

        label = f"the copy for {barrier.label}"
        self.cluster.deliver(Delivery(label, block, deque((land, complete))), lambda: target.fill(POISON))

    def _preempt(self) -> None:
        """A point at which another warp may run."""
        if self.cluster.rng is not None:
            self.cluster.ready.append(self)
            self.cluster.hub.switch()

    def _park(self, barrier: Barrier, what: str) -> None:
        self.waiting_for = what
        barrier.waiters.append(self)
        self.cluster.hub.switch()

    def _release(self) -> Clock | None:
        return self._actor.release() if self._actor else None

    def _acquire(self, barrier: Barrier) -> None:
        if self._actor:
            self._actor.acquire(barrier.released)


def _region(offset: int, view: NDArray[Any]) -> Region:
    rows = view.shape[0]
    return Region.of(offset, rows, view.nbytes // rows, view.strides[0])


def current() -> Warp:
    """The warp that runs.

    Raises:
        LockstepError: no launch is under way on this thread.
    """
    warp = getcurrent()
    if not isinstance(warp, Warp):
        raise LockstepError("this operation works only inside a kernel that run_kernel runs")
    return warp
