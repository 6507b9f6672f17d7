"""A benchmark run: ceilings first, then shape after shape, each printed and stored as soon as it is there."""

from __future__ import annotations

import contextlib
import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from harness.bench_ceilings import measure_ceilings
from harness.bench_inputs import (
    DEFAULT_POOL_SLOTS,
    Coldness,
    Workload,
    make_pool,
    pool_slots,
)
from harness.bench_machine import describe_machine, describe_versions, find_commit
from harness.bench_measure import Entry, References, ShapeRun
from harness.bench_options import Settings
from harness.bench_record import Record, line, make_record
from harness.bench_shapes import BenchShape
from harness.bench_subject import Variant
from harness.peers import Peer
from harness.peers.base import first_line
from harness.work import Ceilings

SCHEMA = "verify-numba-bench/1"
CPU_POOL_SLOTS = 4096
CPU_COLD = Coldness(bytes=0, min_sets=2)


@dataclass
class BenchRun:
    """`seconds` is the budget of the whole run, or None; `store` is called with the result after each step."""

    settings: Settings
    peers: Sequence[Peer]
    device: torch.device
    seed: int = 0
    pass_seconds: float = 0.4
    seconds: float | None = None
    pool_slots: int | None = None
    commit: str | None = None
    store: Callable[[dict[str, Any]], None] = lambda result: None
    result: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        """0 all measured, 1 where ours was wrong or failed. Raises UsageError before anything is measured."""
        started = time.monotonic()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        cold = Coldness() if self.device.type == "cuda" else CPU_COLD
        peers = self._open_result()
        ceilings = self._measure_ceilings()
        pool = self._make_pool(cold)
        self._save()
        longest = 0.0
        for position, shape in enumerate(self.settings.shapes):
            if self.seconds is not None and time.monotonic() - started + longest > self.seconds:
                self._stop_early(position)
                break
            shape_start = time.monotonic()
            if not self._shape(shape, pool, cold, peers, ceilings):
                break
            longest = max(longest, time.monotonic() - shape_start)
        else:
            self.result["complete"] = True
        self._save()
        return (
            1
            if any("us" not in record for record in self.result["results"]) or self.result["failures"]
            else 0
        )

    def _open_result(self) -> list[Peer]:
        reasons = {peer.name: peer.available(self.device) for peer in self.peers}
        self.result |= {
            "schema": SCHEMA,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "harness", *sys.argv[1:]]),
            "commit": self.commit or find_commit(),
            "machine": describe_machine(self.device),
            "versions": describe_versions(),
            "seed": self.seed,
            "peers": {name: {"missing": reason} for name, reason in reasons.items()},
            "results": [],
            "failures": [],
            "complete": False,
        }
        say(
            f"{self.result['machine'].get('gpu', 'CPU, host clock')}; commit {self.result['commit'] or 'unknown'}"
        )
        for name, reason in reasons.items():
            say(f"peer {name}: {reason or 'ready'}")
        return [peer for peer in self.peers if reasons[peer.name] is None]

    def _measure_ceilings(self) -> Ceilings:
        ceilings = measure_ceilings(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.result["ceilings"] = {
            "read_bytes_per_s": ceilings.read_bytes_per_s,
            "mma_flops_per_s": ceilings.mma_flops_per_s,
        }
        say(
            f"ceilings measured here: read {ceilings.read_bytes_per_s / 1e9:.0f} GB/s, "
            f"bf16 product {ceilings.mma_flops_per_s / 1e12:.0f} TFLOP/s"
        )
        return ceilings

    def _make_pool(self, cold: Coldness) -> Tensor:
        least = self.pool_slots or (DEFAULT_POOL_SLOTS if self.device.type == "cuda" else CPU_POOL_SLOTS)
        slots = pool_slots(self.settings.shapes, cold, least)
        self.result["pool_slots"] = slots
        return make_pool(slots, self.device, self.seed)

    def _shape(
        self,
        shape: BenchShape,
        pool: Tensor,
        cold: Coldness,
        peers: Sequence[Peer],
        ceilings: Ceilings,
    ) -> bool:
        """False where the run cannot go on, because the device is in an error state."""
        try:
            work = Workload(shape, pool, cold, self.seed)
            for mode, ours, theirs in self._entries(work, peers):
                for entry in ours:
                    self._report(make_record(work, entry, theirs, ceilings, mode))
        except Exception as error:  # noqa: BLE001 - one shape must not cost the others
            message = (
                f"H {shape.H} T {shape.T} L {shape.length_label}: {type(error).__name__}: {first_line(error)}"
            )
            self.result["failures"].append(message)
            say(f"FAILED {message}")
            self._save()
            return self._device_usable()
        finally:
            gc.collect()
            if self.device.type == "cuda":
                with contextlib.suppress(RuntimeError):  # a GPU in an error state has been reported above
                    torch.cuda.empty_cache()
        return True

    def _entries(
        self, work: Workload, peers: Sequence[Peer]
    ) -> Iterator[tuple[str, list[Entry], list[Entry]]]:
        variants = [Variant(split, form) for form in self.settings.forms for split in self.settings.splits]
        modes = self.settings.modes if self.device.type == "cuda" else ("host",)
        references = References(work)
        for mode in modes:
            ours, theirs = ShapeRun(work, references, mode, self.pass_seconds, say).run(variants, peers)
            yield mode, ours, theirs

    def _report(self, record: Record) -> None:
        label = BenchShape(tuple(record["lengths"]), record["T"], record["H"]).length_label
        say(line(record, label))
        self.result["results"].append(record)
        self._save()

    def _stop_early(self, position: int) -> None:
        left = self.settings.shapes[position:]
        self.result["not_run"] = [f"H {s.H} T {s.T} L {s.length_label} {s.slots}" for s in left]
        say(
            f"time is up: {position} of {len(self.settings.shapes)} shapes done; not run: {self.result['not_run']}"
        )

    def _device_usable(self) -> bool:
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            say(f"the GPU is in an error state, the run stops here: {first_line(error)}")
            return False
        return True

    def _save(self) -> None:
        self.store(self.result)


def say(text: str) -> None:
    print(text, flush=True)
