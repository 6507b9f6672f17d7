"""One contender in one mode on one shape: its check, its passes, or the reason why it has none."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.bench_contestant import Contestant, Failed
from harness.bench_link import Message
from harness.bench_subject import Variant
from harness.timer import Timing


@dataclass
class Entry:
    """`timing` is there once the check is green; `error` ends the entry, with the passes that it had."""

    contestant: Contestant
    shape: Message
    variant: Variant = field(default_factory=Variant)
    id: int = 0
    plan: str = ""
    note: str = ""
    mask: str = ""
    check: Message | None = None
    timing: Timing | None = None
    error: str = ""

    @property
    def name(self) -> str:
        return self.contestant.name

    @property
    def timed(self) -> bool:
        return self.timing is not None and bool(self.timing.passes) and not self.error

    def open(self, mode: str) -> None:
        """Have it checked and made ready; an error is kept, not raised."""
        try:
            reply = self.contestant.open(self.shape, mode, self.variant.as_json(), self.id)
        except Failed as failure:
            self.error = str(failure)
            return
        self.plan, self.note, self.mask, self.check = (reply[key] for key in ("plan", "note", "mask", "check"))
        if reply["mode"]:
            self.timing = Timing(reply["mode"])

    def add_pass(self, seconds: float) -> None:
        """Time it once more, if it is fit to be timed."""
        if self.timing is None or self.error:
            return
        try:
            self.timing.passes.append(self.contestant.time(self.shape, self.id, seconds))
        except Failed as failure:
            self.error = str(failure)
