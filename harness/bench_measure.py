"""One shape, measured: check, time ours, time each peer, then all of them again in the same order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.bench_check import Check, Reference, judge, reference
from harness.bench_inputs import Workload
from harness.bench_subject import NAME as SUBJECT
from harness.bench_subject import Variant, prepare_subject
from harness.peers.base import CHAIN, OPEN, Contender, Peer, PeerRefused, first_line
from harness.timer import Stopwatch, Timing, make_stopwatch

Say = Callable[[str], None]
SLOW_PREPARE_S = 5.0


@dataclass
class Entry:
    """One contender in one mode: its checks, its times, or the reason why it has none."""

    name: str
    variant: Variant | None = None
    plan: str = ""
    note: str = ""
    check: Check | None = None
    timing: Timing | None = None
    error: str = ""
    stopwatch: Stopwatch | None = field(default=None, repr=False)

    @property
    def red(self) -> bool:
        """It ran and was wrong."""
        return self.check is not None and not self.check.green


class References:
    """Float64 results for a workload, computed once for each slot set and mask that somebody needs."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._known: dict[tuple[int, str, bool], Reference] = {}

    def get(self, index: int, mask: str, own_pages: bool) -> Reference:
        key = (index, mask, own_pages)
        if key not in self._known:
            work = self._work
            slots = work.slots_of_pages(index) if own_pages else work.sets[index]
            self._known[key] = reference(work.q, work.pool, slots, _tails(work, mask), work.sm_scale)
        return self._known[key]


class ShapeRun:
    """Measures one workload in one mode; `seconds` bounds the rounds of one pass of one contender."""

    def __init__(
        self,
        work: Workload,
        references: References,
        mode: str,
        seconds: float,
        say: Say,
    ) -> None:
        self._work, self._references, self._mode = work, references, mode
        self._seconds, self._say = seconds, say

    def run(self, variants: Sequence[Variant], peers: Sequence[Peer]) -> tuple[list[Entry], list[Entry]]:
        """Entries of our variants and of the peers. A contender that is wrong or fails is not timed."""
        ours = [self._subject(variant) for variant in variants]
        for entry in ours:
            if entry.timing and peers:  # a line to keep, should a peer take the process down
                self._say(f"  first pass, {entry.variant}: {entry.timing.us:.1f} us; now the peers")
        theirs = [self._peer(peer) for peer in peers] if any(e.timing for e in ours) else []
        for entry in (*ours, *theirs):
            if entry.timing and entry.stopwatch:
                entry.timing.measure(entry.stopwatch, self._seconds)
            entry.stopwatch = None  # frees the graph and what it holds
        return ours, theirs

    def _subject(self, variant: Variant) -> Entry:
        entry = Entry(SUBJECT, variant)
        try:
            contender, entry.plan = prepare_subject(self._work, variant)
        except ValueError as refusal:
            entry.error = first_line(refusal)
            return entry
        self._measure(entry, contender, self._mode)
        return entry

    def _peer(self, peer: Peer) -> Entry:
        entry = Entry(peer.name)
        start = time.perf_counter()
        try:
            contender = peer.prepare(self._work)
            contender.calls[0]()
            self._tell_slow_start(peer.name, time.perf_counter() - start)
            self._measure_peer(entry, contender)
        except PeerRefused as refusal:
            entry.error = str(refusal)
        except Exception as error:  # noqa: BLE001 - a foreign kernel may fail in any way; the run goes on
            entry.error = f"{type(error).__name__}: {first_line(error)}"
        return entry

    def _measure_peer(self, entry: Entry, contender: Contender) -> None:
        entry.note = contender.note
        try:
            self._measure(entry, contender, self._mode)
        except PeerRefused:
            raise
        except Exception as error:
            if self._mode != "graph":
                raise
            torch.cuda.synchronize()
            entry.note = f"eager, since its capture failed ({first_line(error)})"
            self._measure(entry, contender, "eager")

    def _measure(self, entry: Entry, contender: Contender, mode: str) -> None:
        entry.check = check_contender(contender, self._references, 0)
        if not entry.check.green:
            return
        stopwatch = make_stopwatch(mode, contender.calls)
        contender.output.poison()
        stopwatch.round()
        entry.check = judge_output(contender, self._references, self._work.n_sets - 1)
        if not entry.check.green:
            return
        entry.stopwatch, entry.timing = stopwatch, Timing(mode)
        entry.timing.measure(stopwatch, self._seconds)

    def _tell_slow_start(self, name: str, seconds: float) -> None:
        if seconds > SLOW_PREPARE_S:
            self._say(f"  {name} took {seconds:.0f} s to compile and start")


def check_contender(contender: Contender, references: References, index: int) -> Check:
    """Call it on slot set `index` and compare what it leaves."""
    contender.output.poison()
    contender.calls[index]()
    return judge_output(contender, references, index)


def judge_output(contender: Contender, references: References, index: int) -> Check:
    """Compare what the contender left with the reference of slot set `index`."""
    output = contender.output
    assert output.out is not None, f"{contender.name} left no output"
    ref = references.get(index, contender.mask, contender.own_pages)
    return judge(output.out, output.lse, ref, peer=contender.name != SUBJECT)


def _tails(work: Workload, mask: str) -> Tensor:
    """[bs, T, T] bool: what draft tokens see of each other under `mask`."""
    full = torch.ones_like(work.tree)
    return {CHAIN: full.tril(), OPEN: full}.get(mask, work.tree)
