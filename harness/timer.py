"""How a call is timed: a replayed CUDA graph, CUDA events around eager calls, or the host clock on a CPU.

Every stopwatch runs a list of calls, one for each disjoint set of slots, so that a latent row is cold again when
its turn comes; a sample is the time of a whole round divided by the number of calls, in microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

Call = Callable[[], None]

MIN_REPEATS = 3
MAX_REPEATS = 40
WARM_S = 0.02
"""Rounds that are not counted, so that clocks are up before the first sample."""


class Stopwatch(Protocol):
    """`run` issues all calls once; `round` does so between two clocks and gives microseconds a call."""

    mode: str

    def run(self) -> None: ...

    def round(self) -> float: ...


class GraphStopwatch:
    """All calls captured in one CUDA graph; a round is one replay between two events.

    A graph holds addresses, not tensors: it keeps the calls, and with them every buffer and plan that they were
    captured with, for as long as it can be replayed.

    Raises whatever a call raises inside the capture (a peer that cannot be captured).
    """

    mode = "graph"

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        for call in calls[:2]:  # compile and load outside the capture
            call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                call()
        self._graph.replay()
        torch.cuda.synchronize()

    def run(self) -> None:
        self._graph.replay()

    def round(self) -> float:
        return _between_events(self.run) / len(self._calls)


class EagerStopwatch:
    """Calls issued one after the other between two events: GPU time or host time, whichever is longer."""

    mode = "eager"

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()

    def run(self) -> None:
        _run_all(self._calls)

    def round(self) -> float:
        return _between_events(self.run) / len(self._calls)


class HostStopwatch:
    """The host clock around the calls, for runs on a CPU; says nothing about a GPU."""

    mode = "host"

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def run(self) -> None:
        _run_all(self._calls)

    def round(self) -> float:
        start = time.perf_counter()
        self.run()
        return (time.perf_counter() - start) * 1e6 / len(self._calls)


@dataclass
class Timing:
    """Samples of one contender, by pass; between two passes another contender has run."""

    mode: str
    passes: list[list[float]] = field(default_factory=list)

    @property
    def us(self) -> float:
        """Median over the samples of all passes."""
        return statistics.median(sample for samples in self.passes for sample in samples)

    @property
    def medians(self) -> list[float]:
        """The median of each pass: their distance is the spread to believe."""
        return [statistics.median(samples) for samples in self.passes]

    @property
    def spread_percent(self) -> float:
        return 100.0 * (max(self.medians) - min(self.medians)) / self.us


def take_pass(stopwatch: Stopwatch, seconds: float) -> list[float]:
    """Microseconds a call, one sample a round: as many as fit in `seconds`, within MIN_REPEATS and MAX_REPEATS."""
    samples: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_S:
        stopwatch.round()
    start = time.perf_counter()
    while len(samples) < MAX_REPEATS:
        samples.append(stopwatch.round())
        if len(samples) >= MIN_REPEATS and time.perf_counter() - start > seconds:
            break
    return samples


def make_stopwatch(mode: str, calls: Sequence[Call]) -> Stopwatch:
    """The stopwatch for `mode`: "graph", "eager" or "host"."""
    kinds: dict[str, Callable[[Sequence[Call]], Stopwatch]] = {
        "graph": GraphStopwatch,
        "eager": EagerStopwatch,
        "host": HostStopwatch,
    }
    return kinds[mode](calls)


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _between_events(work: Call) -> float:
    """Microseconds between two events on the current stream around `work`."""
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3
