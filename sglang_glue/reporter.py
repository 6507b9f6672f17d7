"""A thread that carries the counters of this process to its counter file and to SGLang's Prometheus metrics.

It reads host memory alone: no CUDA call, no lock shared with the serving thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from sglang_glue.metrics import Metrics
from sglang_glue.status import StatusFile

log = logging.getLogger(__name__)

PERIOD_S = 1.0

Json = dict[str, Any]
Source = Callable[[], Json]


class Reporter:
    """Reports every backend of this process that was added, until the process ends."""

    def __init__(self, status: StatusFile, metrics: Metrics | None, period_s: float = PERIOD_S) -> None:
        self._status = status
        self._metrics = metrics
        self._period_s = period_s
        self._sources: list[Source] = []
        self._failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="verify-numba-report", daemon=True)

    def add(self, source: Source) -> None:
        """Report what `source` returns from now on; the first call starts the thread."""
        self._sources.append(source)
        self.report()
        if not self._thread.is_alive():
            self._thread.start()

    def close(self) -> None:
        """Report once more and stop."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.report()

    def report(self) -> None:
        """Write the present state now. A failure is logged once and never raised."""
        try:
            backends = [source() for source in list(self._sources)]
            self._status.update({"backends": backends})
            if self._metrics is not None:
                self._metrics.update(backends)
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("verify-numba: counters cannot be reported (logged once)")

    def _loop(self) -> None:
        while not self._stop.wait(self._period_s):
            self.report()
