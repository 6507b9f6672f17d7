"""One contender on one workload in one mode: bound, checked, captured, checked again, then ready to be timed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.bench_check import Check, Reference, judge, reference
from harness.bench_inputs import Workload
from harness.bench_subject import NAME as SUBJECT
from harness.peers.base import CHAIN, Contender, PeerRefused, first_line
from harness.timer import Stopwatch, make_stopwatch


@dataclass(frozen=True)
class Opened:
    """`stopwatch` is None where the check is red: what is wrong is not timed."""

    check: Check
    note: str
    stopwatch: Stopwatch | None


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


def open_contender(contender: Contender, references: References, mode: str) -> Opened:
    """Check and get ready in `mode`. A peer that cannot be captured is timed eager, and its note says so."""
    try:
        return _open(contender, references, mode)
    except PeerRefused:
        raise
    except Exception as error:
        if mode != "graph" or contender.name == SUBJECT:
            raise
        torch.cuda.synchronize()  # raises where the device is beyond use
        note = f"eager, since its capture failed ({first_line(error)})"
        return _open(replace(contender, note=note), references, "eager")


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


def _open(contender: Contender, references: References, mode: str) -> Opened:
    check = check_contender(contender, references, 0)
    if not check.green:
        return Opened(check, contender.note, None)
    stopwatch = make_stopwatch(mode, contender.calls)
    contender.output.poison()
    stopwatch.round()
    check = judge_output(contender, references, len(contender.calls) - 1)
    return Opened(check, contender.note, stopwatch if check.green else None)


def _tails(work: Workload, mask: str) -> Tensor:
    """[bs, T, T] bool: what draft tokens see of each other under `mask`."""
    return torch.ones_like(work.tree).tril() if mask == CHAIN else work.tree
