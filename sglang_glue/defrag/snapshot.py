"""Who owns which slot, as plain arrays: the planner's whole input, the same on every tensor-parallel rank.

Slots 1..size are each either free, cached or held: *cached* by a node of the radix tree, *held* by one request
beyond what the tree has of it (its over-allocated tail included). ``Snapshot.check`` is that law.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from sglang_glue.defrag.runs import Slots, mean_run


class OwnershipError(ValueError):
    """A slot has no owner or several; the message names the slot and its owners."""


@dataclass(frozen=True)
class Unit:
    """A stretch of one sequence that moves as a whole: a tree node's slots or a request's own tail.

    ``readers`` is how many requests read it now, ``follows`` the index of the unit whose last token comes before
    this one's first, or -1. Units are ordered parents first.
    """

    slots: Slots
    readers: int
    follows: int
    name: str


@dataclass(frozen=True)
class Snapshot:
    """The state of a pool of ``size`` slots at one moment. ``rows`` are the slot lists that the live requests read."""

    size: int
    free: Slots
    units: tuple[Unit, ...]
    rows: tuple[Slots, ...]

    @property
    def mean_run(self) -> float:
        """Mean run length over the live requests' rows, 0.0 when none is live."""
        return mean_run(self.rows)

    def check(self) -> None:
        """Raise OwnershipError unless every slot 1..size has one owner and every row reads owned slots only."""
        owned = np.concatenate([slots for _, slots in self._owners()])
        if owned.size and (int(owned.min()) < 1 or int(owned.max()) > self.size):
            raise OwnershipError(self._outside())
        counts = np.bincount(owned, minlength=self.size + 1)  # once: a pool may be large and its owners many
        wrong = np.flatnonzero(counts[1:] != 1) + 1
        if wrong.size:
            raise OwnershipError(self._blame(int(wrong[0]), int(wrong.size)))
        free = np.zeros(self.size + 1, bool)
        free[self.free] = True
        for i, row in enumerate(self.rows):
            if row.size and (int(row.min()) < 1 or int(row.max()) > self.size):
                slot = int(row[(row < 1) | (row > self.size)][0])
                raise OwnershipError(f"live row {i} reads slot {slot}, which lies outside 1..{self.size}")
            if free[row].any():
                raise OwnershipError(f"live row {i} reads slot {int(row[free[row]][0])}, which is free")

    def digest(self) -> int:
        """A checksum of the whole state; equal snapshots on all ranks have equal digests."""
        crc = zlib.crc32(np.sort(self.free).tobytes(), self.size)
        for unit in self.units:
            crc = zlib.crc32(unit.slots.tobytes(), crc)
            crc = zlib.crc32(np.array([unit.readers, unit.follows], np.int64).tobytes(), crc)
        for row in self.rows:
            crc = zlib.crc32(row.tobytes(), crc)
        return crc

    def _owners(self) -> list[tuple[str, Slots]]:
        return [("free list", self.free), *((unit.name, unit.slots) for unit in self.units)]

    def _outside(self) -> str:
        found = ((where, s[(s < 1) | (s > self.size)]) for where, s in self._owners())
        where, slots = next((where, s) for where, s in found if s.size)
        return f"{where}: slot {int(slots[0])} lies outside 1..{self.size}"

    def _blame(self, slot: int, total: int) -> str:
        owners = [
            where for where, slots in self._owners() for _ in range(int(np.count_nonzero(slots == slot)))
        ]
        found = " and ".join(owners) if owners else "nothing"
        return f"slot {slot} belongs to {found} ({total} of {self.size} slots have no owner or several)"
