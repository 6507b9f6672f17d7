"""A relocation: which rows of the pool move where, ordered so that nothing is lost.

A plan maps distinct source slots to distinct destinations; each destination is free or itself a source. Such a map
falls apart into *chains*, which end in a free slot, and *cycles*. A chain is copied from its free end backwards and
a cycle through one saved row, so rows are moved in place whatever the overlap. The mover needs only ``path``:
along it, row ``path[j + 1]`` goes to ``path[j]``; a cycle's first row goes to its last place.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_glue.defrag.runs import Slots


class PlanError(ValueError):
    """The moves are no relocation; the message names the slot."""


@dataclass(frozen=True)
class Plan:
    """Moves in an executable order.

    ``path`` [P] int64 slots, ``start`` [C + 1] int64 bounds of the C chains and cycles in it, ``cyclic`` [C] bool.
    ``src``, ``dst`` [M] int64: the same moves as pairs.
    """

    src: Slots
    dst: Slots
    path: Slots
    start: NDArray[np.int64]
    cyclic: NDArray[np.bool_]

    def __len__(self) -> int:
        return int(self.src.size)

    @property
    def chains(self) -> int:
        """Number of chains and cycles: the parallelism of the plan."""
        return int(self.cyclic.size)

    def digest(self) -> int:
        """A checksum; ranks that decided the same have the same."""
        return zlib.crc32(self.dst.tobytes(), zlib.crc32(self.src.tobytes()))

    def lookup(self, size: int) -> Slots:
        """Table [size + 1]: where each slot's content is afterwards (the identity for what stays)."""
        table = np.arange(size + 1, dtype=np.int64)
        table[self.src] = self.dst
        return table

    def free_after(self, free: Slots) -> Slots:
        """The free set after the plan, ascending: filled holes leave it, vacated slots join it."""
        stays = free[~np.isin(free, self.dst)]
        vacated = self.src[~np.isin(self.src, self.dst)]
        return np.sort(np.concatenate((stays, vacated)))


def make_plan(src: Slots, dst: Slots, free: Slots, size: int) -> Plan:
    """Check the moves against the free set and put them in order.

    Raises PlanError for a slot outside 1..size, a source or destination named twice, a source that is free, or a
    destination that is neither free nor a source.
    """
    src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    keep = src != dst
    src, dst = src[keep], dst[keep]
    if src.shape != dst.shape or src.ndim != 1:
        raise PlanError(f"sources {src.shape} and destinations {dst.shape} do not pair up")
    _check_range("source", src, size)
    _check_range("destination", dst, size)
    is_free, is_src = np.zeros(size + 1, bool), np.zeros(size + 1, bool)
    is_free[free] = True
    is_src[src] = True
    if is_free[src].any():
        raise PlanError(f"source slot {int(src[is_free[src]][0])} is free: there is nothing to move")
    blocked = ~(is_free[dst] | is_src[dst])
    if blocked.any():
        raise PlanError(f"destination slot {int(dst[blocked][0])} is in use and does not move away")
    return _order(src, dst, size)


def _check_range(what: str, slots: Slots, size: int) -> None:
    outside = (slots < 1) | (slots > size)
    if outside.any():
        raise PlanError(f"{what} slot {int(slots[outside][0])} lies outside 1..{size}")
    values, counts = np.unique(slots, return_counts=True)
    if (counts > 1).any():
        raise PlanError(f"{what} slot {int(values[counts > 1][0])} is named twice")


def _order(src: Slots, dst: Slots, size: int) -> Plan:
    comes_from = np.zeros(size + 1, np.int64)
    comes_from[dst] = src
    is_src, is_dst = np.zeros(size + 1, bool), np.zeros(size + 1, bool)
    is_src[src] = True
    is_dst[dst] = True
    single = ~is_src[dst] & ~is_dst[src]
    singles = np.stack((dst[single], src[single]), axis=1).reshape(-1)
    lengths = [2] * int(np.count_nonzero(single))
    paths: list[Slots] = [singles]
    seen = np.zeros(size + 1, bool)
    cyclic = [False] * len(lengths)
    for end in np.sort(dst[~single & ~is_src[dst]]).tolist():
        path = _walk(end, comes_from, is_dst, seen)
        paths.append(path)
        lengths.append(path.size)
        cyclic.append(False)
    for any_slot in np.sort(dst[~single]).tolist():
        if not seen[any_slot]:
            path = _walk(any_slot, comes_from, is_dst, seen)
            paths.append(path)
            lengths.append(path.size)
            cyclic.append(True)
    start = np.concatenate(([0], np.cumsum(np.array(lengths, np.int64)))).astype(np.int64)
    return Plan(src, dst, np.concatenate(paths), start, np.array(cyclic, bool))


def _walk(slot: int, comes_from: Slots, is_dst: NDArray[np.bool_], seen: NDArray[np.bool_]) -> Slots:
    """Follow the moves backwards from a destination until the slot that nothing enters, or around the cycle."""
    path = [slot]
    seen[slot] = True
    while is_dst[slot]:
        slot = int(comes_from[slot])
        if seen[slot]:
            break
        seen[slot] = True
        path.append(slot)
    return np.array(path, np.int64)
