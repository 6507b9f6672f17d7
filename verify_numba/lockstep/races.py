"""Finds accesses to shared memory that no barrier keeps in order, whatever order they happened to run in.

Vector clocks: every actor (a warp, or the copies of one warp that complete at one mbarrier) counts its steps
and knows how far each other actor had come when a barrier last made it known. An access races with an earlier
one of another actor that it does not know of. Each word of shared memory remembers who wrote it last and when
each warp read it last. (FastTrack, Flanagan and Freund 2009, with whole tiles for single variables.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.lockstep.errors import RaceError

Clock = NDArray[np.int64]
WORD = 4
"""Bytes that are told apart."""


@dataclass(frozen=True)
class Region:
    """Some words of shared memory: `rows` runs of `width` words, `stride` words apart."""

    first: int
    rows: int
    width: int
    stride: int

    @staticmethod
    def of(offset: int, rows: int, row_bytes: int, stride: int) -> Region:
        """The words that these bytes are in."""
        first, last = offset // WORD, (offset + row_bytes - 1) // WORD
        return Region(first, rows, last - first + 1, stride // WORD)

    def window(self, words: NDArray[Any]) -> NDArray[Any]:
        """[..., rows, width] of [..., words], in place."""
        step = words.itemsize
        shape = (*words.shape[:-1], self.rows, self.width)
        strides = (*words.strides[:-1], step * self.stride, step)
        return np.ndarray(shape, words.dtype, words, step * self.first, strides)


class Actor:
    """One that acts in an order of its own, and what it knows of the others."""

    def __init__(self, label: str, index: int, actors: int) -> None:
        self.label = label
        self.index = index
        self.clock: Clock = np.zeros(actors, np.int64)
        self.clock[index] = 1

    @property
    def now(self) -> int:
        return int(self.clock[self.index])

    def release(self) -> Clock:
        """All that has happened so far, for others to know; what comes next is not part of it."""
        known = self.clock.copy()
        self.clock[self.index] += 1
        return known

    def acquire(self, clock: Clock | None) -> None:
        if clock is not None:
            np.maximum(self.clock, clock, out=self.clock)

    def restart(self, issuer: Clock) -> None:
        """A further step of this actor, which another one starts."""
        now = self.now
        self.clock = issuer.copy()
        self.clock[self.index] = now + 1


class Cast:
    """The actors of one cluster: the warps, block by block, then asynchronous writers as they turn up."""

    def __init__(self, warps: int, asynchronous: int) -> None:
        self._size = warps + asynchronous
        self.actors: list[Actor] = []
        self._writers: dict[tuple[str, int], Actor] = {}

    def add(self, label: str) -> Actor:
        if len(self.actors) == self._size:
            raise ValueError(f"races are checked among at most {self._size} warps and barriers of a cluster")
        self.actors.append(Actor(label, len(self.actors), self._size))
        return self.actors[-1]

    def writer(self, barrier: str, issuer: Actor) -> Actor:
        """The actor of all that `issuer` starts and that completes at this barrier, at its next write."""
        key = barrier, issuer.index
        if key not in self._writers:
            self._writers[key] = self.add(f"a copy that completes at {barrier}")
        writer = self._writers[key]
        writer.restart(issuer.release())
        return writer


class Shadow:
    """What every word of one block's shared memory remembers."""

    def __init__(self, cast: Cast, first_warp: int, warps: int, nbytes: int) -> None:
        words = -(-nbytes // WORD)
        self._cast = cast
        self._first_warp = first_warp
        self._writer = np.zeros(words, np.int16)
        self._written = np.zeros(words, np.int32)
        self._read = np.zeros((warps, words), np.int32)

    def read(self, actor: Actor, region: Region) -> None:
        """A warp of this block reads.

        Raises:
            RaceError: something is there that it does not know to be finished.
        """
        self._check_writers(actor, region, "reads")
        region.window(self._read[actor.index - self._first_warp])[:] = actor.now

    def write(self, actor: Actor, region: Region) -> None:
        """Anybody writes.

        Raises:
            RaceError: somebody may still be writing or reading there.
        """
        self._check_writers(actor, region, "writes")
        warps = slice(self._first_warp, self._first_warp + len(self._read))
        unknown = region.window(self._read) > actor.clock[warps, None, None]
        if unknown.any():
            reader, row, word = np.argwhere(unknown)[0]
            self._fail(actor, "writes", region, row, word, self._first_warp + int(reader), "read")
        region.window(self._writer)[:] = actor.index
        region.window(self._written)[:] = actor.now

    def _check_writers(self, actor: Actor, region: Region, does: str) -> None:
        writer = region.window(self._writer)
        unknown = region.window(self._written) > actor.clock[writer]
        if unknown.any():
            row, word = np.argwhere(unknown)[0]
            self._fail(actor, does, region, row, word, int(writer[row, word]), "wrote")

    def _fail(
        self, actor: Actor, does: str, region: Region, row: int, word: int, other: int, did: str
    ) -> None:
        byte = WORD * int(region.first + region.stride * row + word)
        before = self._cast.actors[other].label
        raise RaceError(
            f"{actor.label} {does} shared byte {byte}, which {before} {did}, with no barrier between"
        )
