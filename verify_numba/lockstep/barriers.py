"""Barriers as the hardware has them, without the waiting: that is the executor's part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verify_numba.lockstep.errors import ProtocolError

if TYPE_CHECKING:
    from verify_numba.lockstep.executor import Warp


class Barrier:
    """Something that completes phase after phase, and the warps that wait for the current one."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.phase = 0
        """Phases completed so far."""
        self.waiters: list[Warp] = []

    def _complete(self) -> None:
        self.phase += 1
        for warp in self.waiters:
            warp.wake()
        self.waiters.clear()


class MBarrier(Barrier):
    """An mbarrier object: a phase completes once all its arrivals and all its transaction bytes are in."""

    def __init__(self, label: str, count: int) -> None:
        super().__init__(label)
        self.count = count
        self.pending = count
        self.tx = 0
        """Bytes expected less bytes arrived; negative while data is here before it was announced."""

    def passed(self, parity: int) -> bool:
        """`mbarrier.try_wait.parity`: whether the phase of this parity, the one before the current one, is over."""
        return self.phase & 1 != parity

    def arrive(self, count: int = 1) -> None:
        if count > self.pending:
            raise ProtocolError(
                f"{count} more arrivals at {self.label}, which takes {self.count} a phase and lacks {self.pending}"
            )
        self.pending -= count
        self._settle()

    def expect(self, nbytes: int) -> None:
        self.tx += nbytes

    def complete(self, nbytes: int) -> None:
        self.tx -= nbytes
        self._settle()

    def _settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.pending = self.count
            self._complete()

    def __str__(self) -> str:
        return f"{self.label} (phase {self.phase}, {self.pending} of {self.count} arrivals and {self.tx} bytes missing)"


class CountedBarrier(Barrier):
    """A barrier of a fixed number of warps: of a block, of a cluster, or a named one."""

    def __init__(self, label: str, count: int) -> None:
        super().__init__(label)
        self.count = count
        self.arrived: list[Warp] = []

    def arrive(self, warp: Warp) -> int:
        """Returns the phase that is over once all have arrived."""
        if warp in self.arrived:
            raise ProtocolError(f"{warp} arrived twice at {self.label} in one phase")
        self.arrived.append(warp)
        phase = self.phase
        if len(self.arrived) == self.count:
            self.arrived.clear()
            self._complete()
        return phase

    def __str__(self) -> str:
        return f"{self.label} (phase {self.phase}, {len(self.arrived)} of {self.count} warps arrived)"
