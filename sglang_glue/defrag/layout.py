"""The planner's picture of the pool: where each token is now, and what moving a stretch of tokens would change.

A token is named by the slot it was in when the snapshot was taken. A *link* is a token whose successor sits in the
next slot; a sequence of n tokens in r runs has n - r links. Links count as often as requests read them, so the sum
of links weighs what the kernels see. Every change is a permutation of slots, hence always a valid relocation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_glue.defrag.runs import Slots
from sglang_glue.defrag.snapshot import Snapshot

FREE = 0


@dataclass(frozen=True)
class Effect:
    """What placing a stretch at a window does: these tokens go to these slots, for this many rows and links."""

    at: int
    tokens: Slots
    slots: Slots
    rows: int
    gain: int


class Layout:
    """Mutable state of a planning round. All arrays are indexed by slot or token number, 0 standing for none."""

    def __init__(self, snapshot: Snapshot) -> None:
        size = snapshot.size
        self.size = size
        self.content = np.arange(size + 1, dtype=np.int64)
        self.content[snapshot.free] = FREE
        self.slot_of = np.arange(size + 1, dtype=np.int64)
        self.succ = np.zeros(size + 1, np.int64)
        self.prev = np.zeros(size + 1, np.int64)
        self.weight = np.zeros(size + 1, np.int64)
        self._mark = np.zeros(size + 1, bool)
        for unit in snapshot.units:
            self._thread(unit.slots, unit.readers)
        for unit in snapshot.units:
            if unit.follows >= 0 and unit.slots.size and snapshot.units[unit.follows].slots.size:
                self._join(int(snapshot.units[unit.follows].slots[-1]), int(unit.slots[0]), unit.readers)

    def _thread(self, slots: Slots, readers: int) -> None:
        self.succ[slots[:-1]] = slots[1:]
        self.prev[slots[1:]] = slots[:-1]
        self.weight[slots[:-1]] = readers

    def _join(self, last: int, first: int, readers: int) -> None:
        """Link a unit to the one before; where several follow one, the first with most readers is kept."""
        if self.succ[last] == 0 or self.weight[last] < readers:
            if self.succ[last]:
                self.prev[self.succ[last]] = 0
            self.succ[last], self.prev[first], self.weight[last] = first, last, readers

    def breaks(self, tokens: Slots) -> int:
        """Missing links inside a stretch of one unit."""
        where = self.slot_of[tokens]
        return int(np.count_nonzero(np.diff(where) != 1))

    def effect(self, tokens: Slots, at: int) -> Effect:
        """The effect of placing ``tokens`` [n] at slots at..at+n-1; whoever is there takes the places they leave."""
        n = tokens.size
        window = np.arange(at, at + n)
        now = self.slot_of[tokens]
        self._mark[tokens] = True
        there = self.content[window]
        displaced = there[(there != FREE) & ~self._mark[there]]
        self._mark[tokens] = False
        vacated = np.sort(now[(now < at) | (now >= at + n)])
        moved = np.concatenate((tokens, displaced))
        target = np.concatenate((window, vacated[: displaced.size]))
        rows = int(np.count_nonzero(self.slot_of[moved] != target))
        return Effect(at, moved, target, rows, self._gain(moved, target))

    def _gain(self, moved: Slots, target: Slots) -> int:
        heads = self.prev[moved]
        self._mark[moved] = True
        outside = heads[(heads != 0) & ~self._mark[heads]]  # distinct: no two tokens follow the same one
        self._mark[moved] = False
        watched = np.concatenate((moved, outside))
        watched = watched[self.succ[watched] != 0]
        before = self._links(watched)
        old = self.slot_of[moved]
        self.slot_of[moved] = target
        after = self._links(watched)
        self.slot_of[moved] = old
        return after - before

    def _links(self, tokens: Slots) -> int:
        joined = self.slot_of[self.succ[tokens]] == self.slot_of[tokens] + 1
        return int(self.weight[tokens][joined].sum())

    def apply(self, effect: Effect) -> None:
        """Carry an effect out."""
        self.content[self.slot_of[effect.tokens]] = FREE
        self.slot_of[effect.tokens] = effect.slots
        self.content[effect.slots] = effect.tokens

    def moves(self) -> tuple[Slots, Slots]:
        """Sources and destinations of all that has changed, ascending by source."""
        tokens = np.sort(self.content[self.content != FREE])
        moved = tokens[self.slot_of[tokens] != tokens]
        return moved, self.slot_of[moved]
