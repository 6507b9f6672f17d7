"""Defragmentation inside one scheduler process: looks every so many steps, asks for a quiet one, relocates.

Everything is decided from step counts and from state that all tensor-parallel ranks share, so ranks decide the same
in the same step; that they do is checked (``ranks.py``). A look costs a few launches and no wait; its result is read
in the next step.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_glue.defrag import torch_meter
from sglang_glue.defrag.controller import Controller
from sglang_glue.defrag.export import Exporter
from sglang_glue.defrag.model_pools import SortCounters
from sglang_glue.defrag.plan import Plan
from sglang_glue.defrag.planner import PlannerSettings
from sglang_glue.defrag.ranks import Ranks, difference, ranks_of
from sglang_glue.defrag.runs import EMPTY, RunStats
from sglang_glue.defrag.settings import DefragSettings
from sglang_glue.defrag.sglang_state import (
    Holder,
    Site,
    holders,
    in_flight,
    requests_of,
    site_of,
    take_snapshot,
)
from sglang_glue.defrag.sglang_transaction import Refused, RelocationError, Stamp, execute, warm_up
from sglang_glue.defrag.snapshot import OwnershipError, Snapshot
from sglang_glue.defrag.unsupported import Unsupported

log = logging.getLogger(__name__)


@dataclass
class AgentCounters:
    """What the agent has done; part of the metrics."""

    looks: int = 0
    drains: int = 0
    relocations: int = 0
    rows_moved: int = 0
    bytes_moved: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    last_plan: str = ""
    longest_pause_ms: float = 0.0
    paused_ms: float = 0.0


class Agent:
    """Watches one scheduler. ``unsupported`` says why it does not relocate there, or is None."""

    def __init__(self, scheduler: Any, settings: DefragSettings, sorting: SortCounters) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.sorting = sorting
        self.counters = AgentCounters()
        self.live: RunStats = EMPTY
        self.free: RunStats = EMPTY
        self.step = 0
        self.exporter = Exporter(_rank_of(scheduler))
        self.site: Site | None = None
        self.unsupported: str | None = None
        self.controller: Controller | None = None
        self.ranks = Ranks()
        self._readings: tuple[torch_meter.Reading, torch_meter.Reading] | None = None
        self._wanted = False

    def enable_relocation(self) -> None:
        """Relocate in this server if all ranks can, or note and log why that is not possible."""
        self.ranks = ranks_of(self.scheduler)
        problem = self._prepare()
        if not all(ready for (ready,) in self.ranks.gather([problem is None])) and problem is None:
            problem = "another rank cannot relocate"
        if problem is not None:
            self.site, self.controller, self.unsupported = None, None, problem
            log.warning("verify-numba: no relocation in this server: %s", problem)

    def _prepare(self) -> str | None:
        """Set up what a relocation needs; returns why that failed."""
        try:
            self.site = site_of(self.scheduler)
            slot_bytes = self.site.pools().slot_bytes
            planner = PlannerSettings(
                max(self.settings.budget_bytes, 2 * slot_bytes),
                slot_bytes,
                low=self.settings.low,
                high=self.settings.high,
            )
        except (Unsupported, ValueError) as error:
            return str(error)
        try:
            warm_up(self.site)
        except Exception as error:
            log.exception("verify-numba: the mover cannot be used")
            return f"the mover cannot be used: {type(error).__name__}: {error}"
        # Half: looks come every interval, and a look that had to wait for a quiet step must not skip the next one.
        self.controller = Controller(planner, max(1, self.settings.interval // 2))
        return None

    def before_step(self) -> bool:
        """Called between two steps; True asks the scheduler to launch nothing now, so that the next call is quiet."""
        self.step += 1
        if self.step > self.settings.interval and (self.step - 1) % self.settings.interval == 0:
            self._read()
        if self._wanted:
            return self._relocate_or_drain()
        if self.step % self.settings.interval == 0:
            self._look()
        return False

    def report(self) -> dict[str, Any]:
        """Settings in force, counters and run lengths, for metrics and status."""
        return {
            "tier": self.settings.tier.value,
            "step": self.step,
            "relocation": self.unsupported or ("on" if self.controller else "off"),
            "sorted_allocator": vars(self.sorting),
            "counters": vars(self.counters),
            "live_runs": self.live.as_dict(),
            "free_runs": self.free.as_dict(),
        }

    def _look(self) -> None:
        """Begin to measure the run lengths of the live rows and of the free list."""
        self.counters.looks += 1
        table = self.scheduler.req_to_token_pool.req_to_token
        held = [h for h in holders(requests_of(self.scheduler)) if h.committed]
        if not held:
            return
        which = torch_meter.upload([h.row for h in held], table.device)
        lengths = torch_meter.upload([h.committed for h in held], table.device)
        live = torch_meter.start(table[which, : max(h.committed for h in held)], lengths)
        allocator = self.scheduler.token_to_kv_pool_allocator
        free = torch.sort(torch.cat((allocator.free_pages, allocator.release_pages))).values
        count = torch_meter.upload([len(free)], free.device)
        self._readings = live, torch_meter.start(free[None], count)

    def _read(self) -> None:
        """Take up the last look's result. Called in the same steps on all ranks, whatever there was to look at."""
        looked = self._readings is not None
        if self._readings is not None:
            self.live, self.free = (r.stats() for r in self._readings)
            self._readings = None
            self.exporter.publish(self.report())
        if self.controller is None or not self._agree(
            ("looking", "wanting", "live tokens", "live runs", "free slots", "free runs"),
            (looked, self._wanted, self.live.tokens, self.live.runs, self.free.tokens, self.free.runs),
        ):
            return
        if looked and not self._wanted and self.controller.due(self.step):
            self._wanted = self.controller.wants(self.live.mean)
            if not self._wanted:
                self.controller.skip(self.step)

    def _agree(self, names: tuple[str, ...], values: tuple[int, ...]) -> bool:
        """Whether all ranks have the same values; if not, relocation ends on all of them, in this very step."""
        problem = difference(names, self.ranks.gather(values))
        if problem is None:
            return True
        self.controller, self._wanted, self.unsupported = None, False, problem
        log.error("verify-numba: relocation is switched off: %s", problem)
        self.refuse(problem)
        self.exporter.publish(self.report())
        return False

    def _relocate_or_drain(self) -> bool:
        reason = in_flight(self.scheduler)
        if reason is None:
            self._wanted = False
            self._relocate()
            return False
        if not self._can_drain():
            return False  # a prefill is under way: try again after the next step
        self.counters.drains += 1
        return True

    def _can_drain(self) -> bool:
        """An idle turn loses nothing when the last batch is a decode batch; a prefill batch still is to be merged."""
        last = self.scheduler.last_batch
        return last is not None and not last.forward_mode.is_extend() and self.scheduler.chunked_req is None

    def _relocate(self) -> None:
        assert self.site is not None and self.controller is not None
        began = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        try:
            self._plan_and_move()
        finally:
            pause = 1e3 * (time.perf_counter() - began)
            self.counters.longest_pause_ms = max(self.counters.longest_pause_ms, pause)
            self.counters.paused_ms += pause
            self.exporter.publish(self.report())

    def _plan_and_move(self) -> None:
        assert self.site is not None and self.controller is not None
        requests = requests_of(self.scheduler)
        held = holders(requests)
        stamp = Stamp.of(self.site)
        snapshot: Snapshot | None = None
        plan: Plan | None = None
        refused = ""
        try:
            snapshot = take_snapshot(self.site, held)
            snapshot.check()
            plan = self.controller.decide(self.step, snapshot)
        except OwnershipError as error:
            refused = str(error)
        if self.ranks.size > 1:
            seen = (bool(refused), snapshot.digest() if snapshot else 0, plan.digest() if plan else 0)
            if not self._agree(("refusing", "the snapshot", "the plan"), seen):
                return
        if refused:
            self.refuse(refused)
        elif snapshot is not None and plan is not None:
            try:
                self._carry_out(snapshot, stamp, plan, held, requests)
            except Refused as error:
                self.refuse(str(error))

    def _carry_out(
        self, snapshot: Snapshot, stamp: Stamp, plan: Plan, held: list[Holder], requests: list[Any]
    ) -> None:
        assert self.site is not None
        batches = (self.scheduler.running_batch, self.scheduler.last_batch)
        moved = execute(self.site, snapshot, stamp, plan, held, requests, batches)
        verify(self.site, snapshot, plan, held)
        self.counters.relocations += 1
        self.counters.rows_moved += len(plan)
        self.counters.bytes_moved += moved
        self.counters.last_plan = f"{len(plan)} rows in {plan.chains} chains, digest {plan.digest():08x}"

    def refuse(self, reason: str) -> None:
        """Count a refused relocation; the first of each reason is logged."""
        if reason not in self.counters.refused and len(self.counters.refused) < 32:
            log.warning("verify-numba: relocation refused: %s", reason)
            self.counters.refused[reason] = 0
        if reason in self.counters.refused:
            self.counters.refused[reason] += 1


def _rank_of(scheduler: Any) -> str:
    """The tensor-parallel rank; 0.5.17 and later keep it among the parallel settings."""
    for owner in (scheduler, getattr(scheduler, "ps", None)):
        if owner is not None and hasattr(owner, "tp_rank"):
            return str(owner.tp_rank)
    return "unknown"


def verify(site: Site, before: Snapshot, plan: Plan, held: list[Holder]) -> None:
    """Raise RelocationError unless every slot has one owner and every owner has its slots under their new names."""
    table = plan.lookup(before.size)
    try:
        after = take_snapshot(site, held)
        after.check()
    except OwnershipError as error:
        raise RelocationError(f"after a relocation {error}") from error
    for old, new in zip(before.units, after.units, strict=True):
        if not np.array_equal(table[old.slots], new.slots):
            raise RelocationError(
                f"after a relocation {new.name} does not name the slots that it was moved to"
            )
    for i, (old_row, new_row) in enumerate(zip(before.rows, after.rows, strict=True)):
        if not np.array_equal(table[old_row], new_row):
            raise RelocationError(
                f"after a relocation live row {i} does not read the slots that it was moved to"
            )
