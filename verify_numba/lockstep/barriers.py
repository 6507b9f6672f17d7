"""Barriers as the hardware has them, without the waiting: that is the machine's part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verify_numba.lockstep.errors import ProtocolError
from verify_numba.lockstep.races import Clock

if TYPE_CHECKING:
    from verify_numba.lockstep.machine import Warp


class Barrier:
    """Something that completes phase after phase, and the warps that wait for the current one."""

    def __init__(self, label: str, count: int) -> None:
        self.label = label
        self.count = count
        """Arrivals that a phase takes."""
        self.phase = 0
        """Phases completed so far."""
        self.waiters: list[Warp] = []
        self.released: Clock | None = None
        """What happened before the last completed phase ended; None where races are not checked."""
        self._arriving: Clock | None = None

    def _release(self, clock: Clock | None) -> None:
        """An arrival brings along everything that its warp has done."""
        if clock is not None:
            self._arriving = clock if self._arriving is None else np.maximum(self._arriving, clock)

    def _complete(self) -> None:
        self.phase += 1
        self.released, self._arriving = self._arriving, None
        for warp in self.waiters:
            warp.wake()
        self.waiters.clear()


class MBarrier(Barrier):
    """An mbarrier: a phase completes once all its arrivals and all its transaction bytes are in."""

    def __init__(self, label: str, count: int) -> None:
        super().__init__(label, count)
        self.pending = count
        self.tx = 0
        """Bytes expected less bytes arrived; negative while data is here before it was announced."""

    def passed(self, parity: int) -> bool:
        """`try_wait.parity`: whether the phase of this parity, the one before the current one, is over."""
        return self.phase & 1 != parity

    def arrive(self, count: int, clock: Clock | None) -> None:
        if count > self.pending:
            raise ProtocolError(f"{count} arrivals too many at {self}")
        self._release(clock)
        self.pending -= count
        self._settle()

    def expect(self, nbytes: int) -> None:
        self.tx += nbytes

    def complete(self, nbytes: int, clock: Clock | None) -> None:
        self._release(clock)
        self.tx -= nbytes
        self._settle()

    def _settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.pending = self.count
            self._complete()

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals and {self.tx} bytes are missing"
        return f"{self.label} (phase {self.phase}: {missing})"


class CountedBarrier(Barrier):
    """A barrier of a fixed number of warps: of a block, of a cluster, or a named one."""

    def __init__(self, label: str, count: int) -> None:
        super().__init__(label, count)
        self.arrived: list[Warp] = []

    def arrive(self, warp: Warp, clock: Clock | None) -> int:
        """Returns the number of the phase, which is over once all have arrived."""
        if warp in self.arrived:
            raise ProtocolError(f"{warp} arrived twice in one phase of {self}")
        self._release(clock)
        self.arrived.append(warp)
        phase = self.phase
        if len(self.arrived) == self.count:
            self.arrived.clear()
            self._complete()
        return phase

    def __str__(self) -> str:
        return f"{self.label} (phase {self.phase}: {len(self.arrived)} of {self.count} warps have arrived)"
