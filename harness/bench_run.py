"""A benchmark run: ceilings first, then every contender compiles, then shape after shape, each stored as it comes.

Each contender has a process of its own, so that one that fails costs nobody else. They start and compile side by side;
from then on one runs at a time, and ours runs again after every peer, so that a drift of the machine shows.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from harness.bench_ceilings import measure_ceilings
from harness.bench_contestant import Contestant, Failed, Limits
from harness.bench_entry import Entry
from harness.bench_inputs import DEFAULT_POOL_SLOTS, Coldness, check_pool_fits, pool_slots
from harness.bench_link import ProcessLink
from harness.bench_machine import describe_machine, describe_versions, find_commit
from harness.bench_options import Settings
from harness.bench_record import Record, Task, line, make_record
from harness.bench_shapes import BenchShape
from harness.bench_subject import NAME as SUBJECT
from harness.bench_subject import Variant
from harness.bench_worker import Config
from harness.work import Ceilings

SCHEMA = "verify-numba-bench/1"
CPU_POOL_SLOTS = 4096
CPU_COLD = Coldness(bytes=0, min_sets=2)


@dataclass
class BenchRun:
    """`seconds` is the budget of the whole run, or None; `store` is called with the result after each step."""

    settings: Settings
    peers: Sequence[str]
    device: torch.device
    seed: int = 0
    pass_seconds: float = 0.2
    seconds: float | None = None
    pool_slots: int | None = None
    commit: str | None = None
    limits: Limits = field(default_factory=Limits)
    log_dir: Path | None = None
    store: Callable[[dict[str, Any]], None] = lambda result: None
    result: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        """0 all measured, 1 where ours was wrong or failed. Raises UsageError before anything is measured."""
        self._started = time.monotonic()
        self._open_result()
        slots = self._pool_slots()
        contestants = {name: self._contestant(name, slots) for name in (SUBJECT, *self.peers)}
        try:
            for contestant in contestants.values():
                contestant.start()
            ceilings = self._measure_ceilings()
            self._meet(contestants)
            with ThreadPoolExecutor(len(contestants)) as pool:
                list(pool.map(self._warm, contestants.values()))
            subject, *others = contestants.values()
            self._shapes(subject, others, ceilings)
        finally:
            for contestant in contestants.values():
                contestant.stop()
        self._save()
        return 1 if any("us" not in record for record in self.result["results"]) else 0

    @property
    def _cold(self) -> Coldness:
        return Coldness() if self.device.type == "cuda" else CPU_COLD

    def _open_result(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.result |= {
            "schema": SCHEMA,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "harness", *sys.argv[1:]]),
            "commit": self.commit or find_commit(),
            "machine": describe_machine(self.device),
            "versions": describe_versions(),
            "seed": self.seed,
            "peers": {},
            "results": [],
            "complete": False,
        }
        gpu = self.result["machine"].get("gpu", "CPU, host clock")
        self._say(f"{gpu}; commit {self.result['commit'] or 'unknown'}")

    def _pool_slots(self) -> int:
        least = self.pool_slots or (DEFAULT_POOL_SLOTS if self.device.type == "cuda" else CPU_POOL_SLOTS)
        slots = pool_slots(self.settings.shapes, self._cold, least)
        check_pool_fits(slots, self.device, pools=1 + len(self.peers))
        self.result["pool_slots"] = slots
        return slots

    def _contestant(self, name: str, slots: int) -> Contestant:
        config = Config(name, str(self.device), self.seed, slots, self._cold.bytes, self._cold.min_sets).as_json()
        log = self.log_dir / f"{name.replace(':', '.')}.log" if self.log_dir else None
        return Contestant(name, lambda: ProcessLink(config, log), self.limits, self._say)

    def _measure_ceilings(self) -> Ceilings:
        """Before any contender does more than start."""
        ceilings = measure_ceilings(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.result["ceilings"] = {
            "read_bytes_per_s": ceilings.read_bytes_per_s,
            "mma_flops_per_s": ceilings.mma_flops_per_s,
        }
        self._say(
            f"ceilings measured here: read {ceilings.read_bytes_per_s / 1e9:.0f} GB/s, "
            f"bf16 product {ceilings.mma_flops_per_s / 1e12:.0f} TFLOP/s"
        )
        return ceilings

    def _meet(self, contestants: dict[str, Contestant]) -> None:
        """Drop the peers that cannot run here, with their reasons."""
        for name in self.peers:
            reason = contestants[name].missing()
            self.result["peers"][name] = {"missing": reason}
            self._say(f"peer {name}: {reason or 'ready'}")
            if reason:
                del contestants[name]
        reason = contestants[SUBJECT].missing()
        if reason:
            self._say(f"{SUBJECT}: {reason}")
        self._save()

    def _warm(self, contestant: Contestant) -> None:
        """Compile for every shape; what fails here is told again when the shape is measured."""
        variants = self._variants() if contestant.name == SUBJECT else [Variant()]
        total = 0.0
        for shape in dict.fromkeys(_compiled_for(shape) for shape in self.settings.shapes):
            try:
                total += contestant.warm(shape.as_json(), [variant.as_json() for variant in variants])
            except Failed as failure:
                self._say(f"{contestant.name}, {shape}: {failure}")
                if not contestant.alive:
                    return
        self._say(f"{contestant.name}: compiled and started, {total:.0f} s")

    def _shapes(self, subject: Contestant, peers: Sequence[Contestant], ceilings: Ceilings) -> None:
        longest = 0.0
        for position, shape in enumerate(self.settings.shapes):
            start = time.monotonic()
            if self.seconds is not None and start - self._started + longest > self.seconds:
                self._stop_early(position)
                return
            for mode in self.settings.modes if self.device.type == "cuda" else ("host",):
                self._measure(Task.of(shape, mode, self._cold, self.seed, ceilings), subject, peers)
            longest = max(longest, time.monotonic() - start)
        self.result["complete"] = True

    def _measure(self, task: Task, subject: Contestant, peers: Sequence[Contestant]) -> None:
        """Ours first, then each peer twice with ours between and after; stored after each."""
        shape = task.shape.as_json()
        ours = [Entry(subject, shape, variant, id) for id, variant in enumerate(self._variants())]
        theirs: list[Entry] = []
        earlier = self.result["results"]
        for entry in ours:
            entry.open(task.mode)
        self._pass(ours)
        for peer in peers if any(entry.timed for entry in ours) else ():
            self._keep(earlier, task, ours, theirs)
            self._tell(task, ours, peer)
            entry = Entry(peer, shape)
            theirs.append(entry)
            entry.open(task.mode)
            self._pass([entry, *ours, entry])
            peer.close()
        self._pass(ours)
        subject.close()
        for record in self._keep(earlier, task, ours, theirs):
            print(line(record, task.shape.length_label), flush=True)

    def _tell(self, task: Task, ours: Sequence[Entry], peer: Contestant) -> None:
        times = ", ".join(f"{entry.timing.us:.1f}" for entry in ours if entry.timing and entry.timed)
        seconds = time.monotonic() - self._started
        self._say(f"{seconds:4.0f} s  {task.shape} {task.mode}: ours {times} us; now {peer.name}")

    def _pass(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.add_pass(self.pass_seconds)

    def _keep(self, earlier: list[Record], task: Task, ours: list[Entry], theirs: list[Entry]) -> list[Record]:
        records = [make_record(task, entry, theirs) for entry in ours]
        self.result["results"] = earlier + records
        self._save()
        return records

    def _variants(self) -> list[Variant]:
        return [Variant(split, form) for form in self.settings.forms for split in self.settings.splits]

    def _stop_early(self, position: int) -> None:
        left = self.settings.shapes[position:]
        self.result["not_run"] = [str(shape) for shape in left]
        done = f"{position} of {len(self.settings.shapes)} shapes done"
        self._say(f"time is up: {done}; not run: {', '.join(map(str, left))}")

    def _say(self, text: str) -> None:
        """Progress goes to stderr, results to stdout."""
        print(text, file=sys.stderr, flush=True)

    def _save(self) -> None:
        self.store(self.result)


def _compiled_for(shape: BenchShape) -> BenchShape:
    """Slots decide no code: of shapes that differ in them one is enough."""
    return BenchShape(shape.lengths, shape.T, shape.H)
