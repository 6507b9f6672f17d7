"""Which rows to move: the most scattered stretches of live requests, to where they do the least harm.

Stretches of at most ``piece`` tokens are placed greedily, worst first. For each, a few windows are weighed exactly
(links gained minus links lost, per row copied): right behind the token before it, where part of it lies already,
the tightest free windows, and the emptiest blocks. A placement must gain, so repeated rounds on a still pool raise
a bounded count and come to an end. Only integers are compared, so ranks with equal snapshots decide the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from sglang_glue.defrag.layout import Effect, Layout
from sglang_glue.defrag.plan import Plan, make_plan
from sglang_glue.defrag.runs import Slots, runs_of_set
from sglang_glue.defrag.snapshot import Snapshot

MISSES = 16
"""A round ends after so many stretches in a row that found no place worth its copy; bounds the planning time."""


@dataclass(frozen=True)
class PlannerSettings:
    """``budget_bytes`` a round, ``slot_bytes`` of one slot over all layers and pools, ``piece`` in tokens.

    Work begins when the mean run length falls below ``low`` and ends when it reaches ``high`` (both in tokens).
    """

    budget_bytes: int = 64 << 20
    slot_bytes: int = 1152 * 61
    piece: int = 256
    low: float = 8.0
    high: float = 32.0

    def __post_init__(self) -> None:
        if self.slot_bytes < 1:
            raise ValueError(f"slot_bytes: found {self.slot_bytes}, expected at least 1")
        if self.budget_bytes < 2 * self.slot_bytes:
            raise ValueError(
                f"budget_bytes: found {self.budget_bytes}, expected at least two slots ({2 * self.slot_bytes})"
            )
        if self.piece < 2:
            raise ValueError(f"piece: found {self.piece}, expected at least 2 tokens")
        if not 1.0 <= self.low <= self.high:
            raise ValueError(f"low, high: found {self.low}, {self.high}, expected 1 <= low <= high")

    @property
    def budget_rows(self) -> int:
        """Rows (slots) that one round may move."""
        return self.budget_bytes // self.slot_bytes


class _FreeWindows:
    """The free runs, for best fit; windows that get used are trimmed."""

    def __init__(self, free: Slots) -> None:
        firsts, lengths = runs_of_set(free)
        self.by_length = sorted(zip(lengths.tolist(), firsts.tolist(), strict=True))

    def fits(self, n: int) -> list[int]:
        """Starts of the tightest window that holds n and of the largest one."""
        i = bisect_left(self.by_length, (n, 0))
        found = [self.by_length[i][1]] if i < len(self.by_length) else []
        return found + ([self.by_length[-1][1]] if self.by_length else [])

    def use(self, at: int, n: int) -> None:
        """Cut slots at..at+n-1 out of the window that begins at ``at``, if one does."""
        for i, (length, first) in enumerate(self.by_length):
            if first == at:
                del self.by_length[i]
                if length > n:
                    insort(self.by_length, (length - n, at + n))
                return


class _Blocks:
    """Aligned blocks of ``piece`` slots in order of the links and rows they hold: the cheapest to clear."""

    def __init__(self, layout: Layout, piece: int) -> None:
        count = layout.size // piece
        self.piece = piece
        self.used = 0
        inside = slice(1, 1 + count * piece)
        token = layout.content[inside]
        joined = (token != 0) & (layout.succ[token] != 0)
        joined &= layout.slot_of[layout.succ[token]] == layout.slot_of[token] + 1
        links = np.where(joined, layout.weight[token], 0).reshape(count, piece).sum(axis=1)
        rows = (token != 0).reshape(count, piece).sum(axis=1)
        self.starts = (np.lexsort((rows, links)) * piece + 1).tolist()

    def next(self) -> list[int]:
        """The next two candidates."""
        return self.starts[self.used : self.used + 2]

    def use(self, at: int) -> None:
        """Strike a block that got filled, and those before it."""
        if at in self.next():
            self.used += self.next().index(at) + 1


def plan_round(snapshot: Snapshot, settings: PlannerSettings) -> Plan:
    """One round of relocation within the budget; an empty plan when nothing is worth its copy."""
    layout = Layout(snapshot)
    windows, blocks = _FreeWindows(snapshot.free), _Blocks(layout, settings.piece)
    left, misses = settings.budget_rows, 0
    for piece in _worst_first(snapshot, layout, settings):
        best = _best(layout, piece, windows, blocks, settings, left)
        if best is None:
            misses += 1
            if misses == MISSES:
                break
            continue
        misses = 0
        layout.apply(best)
        windows.use(best.at, piece.size)
        blocks.use(best.at)
        left -= best.rows
        if left < 2:
            break
    src, dst = layout.moves()
    return make_plan(src, dst, snapshot.free, snapshot.size)


def _worst_first(snapshot: Snapshot, layout: Layout, settings: PlannerSettings) -> list[Slots]:
    """Stretches that are read now and lie in several runs, by reader-weighted breaks a row, worst first."""
    limit = min(settings.piece, settings.budget_rows)
    pieces: list[Slots] = []
    score: list[int] = []
    for unit in snapshot.units:
        if unit.readers == 0:
            continue
        for at in range(0, unit.slots.size, limit):
            piece = unit.slots[at : at + limit]
            breaks = layout.breaks(piece) + _detached(layout, piece)
            if breaks:
                pieces.append(piece)
                score.append(breaks * unit.readers * 1024 // piece.size)
    order = np.argsort(-np.array(score, np.int64), kind="stable")
    return [pieces[i] for i in order]


def _detached(layout: Layout, piece: Slots) -> int:
    before = int(layout.prev[piece[0]])
    return int(before != 0 and layout.slot_of[before] + 1 != layout.slot_of[piece[0]])


def _best(
    layout: Layout, piece: Slots, windows: _FreeWindows, blocks: _Blocks, settings: PlannerSettings, left: int
) -> Effect | None:
    """The window with most links gained a row; None when none gains enough within ``left`` rows.

    The first one that mends every break of the stretch and copies nothing else is as good as can be.
    """
    best: Effect | None = None
    breaks = layout.breaks(piece) * int(layout.weight[piece[0]])
    for at in _candidates(layout, piece, windows, blocks):
        effect = layout.effect(piece, at)
        worth = 0 < effect.gain and effect.rows <= left and effect.gain * settings.high >= effect.rows
        if worth and (best is None or effect.gain * best.rows > best.gain * effect.rows):
            best = effect
            if effect.gain >= breaks and effect.tokens.size == piece.size:
                break
    return best


def _candidates(layout: Layout, piece: Slots, windows: _FreeWindows, blocks: _Blocks) -> list[int]:
    n = piece.size
    before = int(layout.prev[piece[0]])
    starts = [int(layout.slot_of[before]) + 1] if before else []
    anchors, counts = np.unique(layout.slot_of[piece] - np.arange(n), return_counts=True)
    starts += anchors[np.argsort(-counts, kind="stable")[:2]].tolist()
    starts += windows.fits(n) + blocks.next()
    return [at for at in dict.fromkeys(starts) if 1 <= at and at + n - 1 <= layout.size]
