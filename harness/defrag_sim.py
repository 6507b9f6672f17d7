"""A simulated server: requests arrive, share prefixes, are prefilled in chunks, draft and commit, end or are aborted.

One step is one turn of SGLang's scheduler: admissions and one prefill chunk, then one speculative decode step of all
running requests, which over-allocates twice the draft length past what is committed. What is drawn does not depend
on the tier, so tiers see the same requests accept the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.defrag_backend import Backend, ServerShape
from harness.defrag_content import Content
from harness.defrag_trace import Arrival
from sglang_glue.defrag.controller import Controller
from sglang_glue.defrag.plan import Plan
from sglang_glue.defrag.runs import RunStats, free_stats, row_stats
from sglang_glue.defrag.snapshot import Snapshot

VOCABULARY = 32000
EXPECTED_SHARE = 0.7
"""Of the longest output, what SGLang expects a request to make at first (its new-token ratio)."""
QUEUE = 64
"""Requests that wait at most; further arrivals are held back at the client."""


@dataclass
class Job:
    """A request on its way through the server."""

    arrival: Arrival
    req: Any
    rng: np.random.Generator
    born: int
    end: int


@dataclass
class Totals:
    """What happened, summed over the run."""

    steps: int = 0
    finished: int = 0
    aborted: int = 0
    retracted: int = 0
    tokens: int = 0
    relocations: int = 0
    rows_moved: int = 0
    longest_pause_rows: int = 0
    planning_seconds: float = 0.0
    longest_planning_seconds: float = 0.0


@dataclass
class Sample:
    """The pool at one step: run lengths of the live requests' rows and of the free set."""

    step: int
    live: RunStats
    free: RunStats


@dataclass
class Server:
    """The simulated server. ``controller`` is None without relocation."""

    shape: ServerShape
    backend: Backend
    arrivals: Iterator[Arrival]
    seed: int
    controller: Controller | None = None
    totals: Totals = field(default_factory=Totals)
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.content = Content(self.backend.layers, self.shape.context + 2 * self.shape.draft)
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.chunked: Job | None = None
        self._upcoming: Arrival | None = next(self.arrivals, None)
        self._families: dict[int, np.random.Generator] = {}
        self._count = 0

    @property
    def live(self) -> list[Job]:
        """Requests that hold slots."""
        return self.running + ([self.chunked] if self.chunked else [])

    @property
    def done(self) -> bool:
        """Whether no request is left and none will come."""
        return self._upcoming is None and not self.waiting and not self.live

    def step(self) -> None:
        """One turn of the scheduler."""
        self.totals.steps += 1
        self._relocate()
        self._receive()
        self._prefill()
        self._decode()

    def sample(self) -> None:
        """Record run lengths."""
        rows = [self.backend.slots_of(j.req, 0, j.req.committed) for j in self.live]
        self.samples.append(Sample(self.totals.steps, row_stats(rows), free_stats(self.backend.free_slots())))

    def check(self) -> None:
        """Raise unless every slot has one owner, all content is right and the counters add up to the pool."""
        jobs = self.live
        self.backend.snapshot([j.req for j in jobs]).check()
        free, cached = self.backend.counted()
        held = sum(j.req.allocated - j.req.protected for j in jobs)
        if free + cached + held != self.shape.slots:
            raise AssertionError(f"free {free} + held {held} + cached {cached} != total {self.shape.slots}")
        self.content.expect_tree(self.backend.stretches())
        for job in jobs:
            slots = self.backend.slots_of(job.req, 0, job.req.committed)
            self.content.expect(f"request {job.born}", slots, self._values(job, 0, job.req.committed))

    def _values(self, job: Job, start: int, end: int) -> Any:
        return self.content.hashes(job.req.tokens[:end])[start:]

    def _receive(self) -> None:
        while self._upcoming and self._upcoming.at <= self.totals.steps and len(self.waiting) < QUEUE:
            self.waiting.append(self._job(self._upcoming))
            self._upcoming = next(self.arrivals, None)
        for job in self.waiting:
            self.backend.match(job.req)

    def _job(self, arrival: Arrival) -> Job:
        self._count += 1
        rng = np.random.default_rng([self.seed, 2, self._count])
        tokens = rng.integers(0, VOCABULARY, arrival.prompt + arrival.output)
        family = np.random.default_rng([self.seed, 3, arrival.family])
        tokens[: arrival.shared] = family.integers(0, VOCABULARY, arrival.shared)
        end = arrival.prompt + (arrival.output if arrival.abort is None else arrival.abort)
        return Job(arrival, self.backend.request(tokens, arrival.prompt), rng, self._count, end)

    def _prefill(self) -> None:
        room = self.shape.chunk
        batch: list[Job] = []
        if self.chunked:
            batch.append(self.chunked)
            room -= self.chunked.req.known - self.chunked.req.committed
        while self.waiting and room > 0 and len(self.running) + len(batch) < self.shape.running:
            job = self.waiting[0]
            self.backend.match(job.req)
            if not self._fits(job, batch) or not self.backend.admit(job.req):
                break
            self.waiting.pop(0)
            batch.append(job)
            room -= job.req.known - job.req.committed
        self.chunked = None
        for job in batch:
            self._prefill_one(job)

    def _fits(self, job: Job, batch: list[Job]) -> bool:
        """SGLang's admission: room for the prompt and a share of the output that all running requests may yet make.

        The share is an estimate, so a server under load does run out and retracts, as SGLang does.
        """
        others = self.running + batch
        to_come = sum(max(0, j.end - j.req.allocated) for j in others) + job.end - job.req.known
        prefill = sum(j.req.known - j.req.committed for j in batch) + job.req.known - job.req.protected
        return not others or prefill + EXPECTED_SHARE * to_come <= self.backend.room()

    def _prefill_one(self, job: Job) -> None:
        req = job.req
        start, end = req.committed, min(req.known, req.committed + self.shape.chunk)
        if not self.backend.grow([req], [end]):
            self._retract(job)
            return
        self.content.write(self.backend.slots_of(req, start, end), self._values(job, start, end))
        req.committed = end
        self.totals.tokens += end - start
        self.backend.share(req)
        if end < req.known:
            self.chunked = job
        else:
            self.running.append(job)

    def _decode(self) -> None:
        draft = self.shape.draft
        while self.running:
            reqs = [j.req for j in self.running]
            if self.backend.grow(reqs, [r.committed + 2 * draft for r in reqs], self.backend.block):
                break
            self._retract(self.running.pop())
        for job in list(self.running):
            self._verify(job)
            if job.req.committed >= job.end:
                self._end(job)

    def _verify(self, job: Job) -> None:
        """Write a step's draft rows and commit those that are accepted; the rest is left as garbage."""
        req, draft = job.req, self.shape.draft
        accepted = min(int(job.rng.geometric(0.4)), draft, job.end - req.committed)
        start = req.committed
        slots = self.backend.slots_of(req, start, start + draft)
        self.content.write(slots, job.rng.integers(0, 1 << 63, draft, np.uint64))
        if accepted > 0:
            self.content.write(slots[:accepted], self._values(job, start, start + accepted))
            req.committed = req.known = start + accepted
            self.totals.tokens += accepted

    def _end(self, job: Job) -> None:
        self.running.remove(job)
        self.backend.finish(job.req, insert=True)
        if job.arrival.abort is None:
            self.totals.finished += 1
        else:
            self.totals.aborted += 1

    def _retract(self, job: Job) -> None:
        self.totals.retracted += 1
        self.backend.finish(job.req, insert=False)
        self.waiting.insert(0, job)

    def _relocate(self) -> None:
        step = self.totals.steps
        if self.controller is None or not self.controller.due(step):
            return
        began = time.perf_counter()
        snapshot = self.backend.snapshot([j.req for j in self.live])
        plan = self.controller.decide(step, snapshot)
        if plan is None:
            return
        took = time.perf_counter() - began
        self.totals.planning_seconds += took
        self.totals.longest_planning_seconds = max(self.totals.longest_planning_seconds, took)
        self._carry_out(snapshot, plan)

    def _carry_out(self, snapshot: Snapshot, plan: Plan) -> None:
        self.backend.relocate(snapshot, plan, [j.req for j in self.live], [j.req for j in self.waiting])
        self.totals.relocations += 1
        self.totals.rows_moved += len(plan)
        self.totals.longest_pause_rows = max(self.totals.longest_pause_rows, len(plan))
