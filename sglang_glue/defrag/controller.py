"""When to relocate: every so many scheduler steps, with hysteresis, and ever more rarely when it does not pay.

Steps are counted, never timed, so ranks that step together decide together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_glue.defrag.plan import Plan
from sglang_glue.defrag.planner import PlannerSettings, plan_round
from sglang_glue.defrag.snapshot import Snapshot

LONGEST_WAIT = 64
"""A fruitless round doubles the wait, up to this many intervals."""


@dataclass
class Controller:
    """Decides from step counts and mean run lengths. ``interval`` is in scheduler steps."""

    settings: PlannerSettings
    interval: int = 64
    active: bool = False
    rounds: int = 0
    fruitless: int = 0
    _next: int = field(default=0, repr=False)
    _wait: int = field(default=1, repr=False)

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"interval: found {self.interval}, expected at least 1 step")
        self._next = self.interval

    def due(self, step: int) -> bool:
        """Whether the metric is to be looked at in this step."""
        return step >= self._next

    def wants(self, mean_run: float) -> bool:
        """Apply the hysteresis to a mean run length: begins below ``low``, ends at ``high``."""
        if mean_run > 0.0:
            self.active = mean_run < (self.settings.high if self.active else self.settings.low)
        return self.active and mean_run > 0.0

    def skip(self, step: int) -> None:
        """Note that this step's look found nothing to do, or that the scheduler was not quiet."""
        self._next = step + self.interval

    def decide(self, step: int, snapshot: Snapshot) -> Plan | None:
        """A plan for this step, or None; schedules the next look."""
        if not self.wants(snapshot.mean_run):
            self.skip(step)
            return None
        plan = plan_round(snapshot, self.settings)
        self.rounds += 1
        if len(plan) == 0:
            self.fruitless += 1
            self._wait = min(2 * self._wait, LONGEST_WAIT)
            self.active = False
        else:
            self._wait = 1
        self._next = step + self.interval * self._wait
        return plan if len(plan) else None
