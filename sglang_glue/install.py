"""Put our function into the verify slot of each backend that is ours, sized and warmed up before any graph capture."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_glue import backend as sgl
from sglang_glue.eligibility import Limits, backend_decline
from sglang_glue.ranks import FallbackFlag, RanksApart, agreed_reason
from sglang_glue.settings import Settings
from sglang_glue.status import StatusFile

if TYPE_CHECKING:
    from sglang_glue.capture import Capture
    from sglang_glue.reporter import Reporter
    from sglang_glue.slot import VerifySlot
    from verify_numba import Verifier

log = logging.getLogger(__name__)

Json = dict[str, Any]


class Installer:
    """The AFTER hook of `TritonAttnBackend.__init__` in one process."""

    def __init__(self, settings: Settings, status: StatusFile) -> None:
        self._settings = settings
        self._status = status
        self._reporter: Reporter | None = None

    def after_init(self, result: None, backend: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        """Enter the slot of `backend`, or leave it as SGLang made it and record why. Raises RanksApart alone."""
        skip_prefill = bool(args[0] if args else kwargs.get("skip_prefill", False))
        try:
            self._consider(backend, model_runner, skip_prefill)
        except RanksApart:
            raise
        except Exception as error:
            log.exception("verify-numba: cannot be installed; Triton serves this backend")
            self._record({"rank": "unknown", "declined": f"{type(error).__name__}: {error}"})

    def _consider(self, backend: Any, model_runner: Any, skip_prefill: bool) -> None:
        facts = sgl.facts_of(backend, model_runner, skip_prefill)
        if not facts.is_target:  # a draft model's backend, or no speculation: there is no verify step to take
            return
        slot, reason = self._build_if_ours(backend, facts)
        if facts.tp_size > 1:
            reason = agreed_reason(facts.rank, reason, sgl.tp_cpu_group())
        if slot is None or reason is not None:
            log.warning("verify-numba: this backend is not ours (%s); Triton serves it", reason)
            self._record({"rank": facts.rank, "declined": reason})
            return
        served, entered = slot, "verify slot" if sgl.has_slot(backend) else "extend kernel"
        self._reports().add(lambda: _report_of(served, facts, entered))
        if slot.capture is not None:
            slot.capture.current.watch(backend)
        sgl.enter_slot(backend, slot)

    def _build_if_ours(self, backend: Any, facts: sgl.BackendFacts) -> tuple[VerifySlot | None, str | None]:
        """What to put into the slot, or why nothing; changes nothing in `backend`."""
        reason = backend_decline(facts)
        if reason is not None:
            return None, reason
        try:
            return self._build(backend, facts), None
        except Exception as error:
            log.exception("verify-numba: cannot be installed; Triton serves this backend")
            return None, f"{type(error).__name__}: {error}"

    def _build(self, backend: Any, facts: sgl.BackendFacts) -> VerifySlot:
        from sglang_glue.board import Board
        from sglang_glue.counters import Counters
        from sglang_glue.diffstats import DiffStats
        from sglang_glue.slot import VerifySlot

        board = Board(len(facts.layer_of) + 1, facts.device)  # the last row: a buffer of no known layer
        return VerifySlot(
            mode=self._settings.mode,
            verifier=self._warm_verifier(facts),
            limits=Limits(facts.max_bs, facts.T, facts.H),
            rows={address: row for row, address in enumerate(facts.layer_of)},
            board=board,
            counters=Counters(list(facts.layer_of.values()), board),
            stats=DiffStats(board, self._settings.threshold),
            triton=sgl.triton_of(backend),
            occupant=sgl.own_occupant(backend),
            capture=self._capture(facts),
            ranks=FallbackFlag(self._status.run_folder, facts.rank) if facts.tp_size > 1 else None,
        )

    def _warm_verifier(self, facts: sgl.BackendFacts) -> Verifier:
        from verify_numba import Verifier

        verifier = Verifier(
            max_bs=facts.max_bs,
            T=facts.T,
            H=facts.H,
            device=facts.device,
            nsplit=self._settings.nsplit,
            form=self._settings.form,
        )
        verifier.warmup()
        return verifier

    def _capture(self, facts: sgl.BackendFacts) -> Capture | None:
        if self._settings.capture is None:
            return None
        from sglang_glue.capture import Capture

        return Capture(self._settings.capture, facts, sgl.CurrentBatch())

    def _record(self, content: Json) -> None:
        self._reports().add(lambda: {"mode": self._settings.mode.value, **content})

    def _reports(self) -> Reporter:
        if self._reporter is None:
            from sglang_glue.metrics import Metrics, metrics_enabled
            from sglang_glue.reporter import Reporter

            self._reporter = Reporter(self._status, Metrics() if metrics_enabled() else None)
        return self._reporter


def _report_of(slot: VerifySlot, facts: sgl.BackendFacts, entered: str) -> Json:
    found: Json = {
        "rank": facts.rank,
        "mode": slot.mode.value,
        "plan": str(slot.verifier.plan),
        "entered": entered,
        "counters": slot.counters.snapshot(),
    }
    if slot.capture is not None:
        found["capture"] = slot.capture.counts()
    if slot.ranks is not None:
        found["ranks"] = {"size": facts.tp_size, "fallback": slot.ranks.message}
    return found
