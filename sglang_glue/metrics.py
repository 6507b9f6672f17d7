"""The counters as Prometheus metrics, in the registry that SGLang serves at /metrics.

SGLang runs prometheus_client in its multiprocess mode: it sets PROMETHEUS_MULTIPROC_DIR for its schedulers when
metrics are enabled, and its HTTP server collects what they write there. Without that variable there is nothing to
join and no metric is made.
"""

from __future__ import annotations

import os
from typing import Any

Json = dict[str, Any]

PREFIX = "verify_numba:"


def metrics_enabled() -> bool:
    """Whether SGLang collects metrics from this process."""
    return bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))


class Metrics:
    """Gauges and counters labelled by rank and mode; `update` takes the snapshots of all backends."""

    def __init__(self) -> None:
        from prometheus_client import (  # not before PROMETHEUS_MULTIPROC_DIR is set
            Counter,
            Gauge,
        )

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, ("rank", "mode", *labels))

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            labels = ("rank", "mode", *labels)
            return Gauge(PREFIX + name, text, labels, multiprocess_mode="mostrecent")

        self._calls = counter("calls", "Verify attention calls served by verify-numba.", "tag")
        self._declines = counter("declines", "Verify attention calls left to Triton.", "tag", "reason")
        self._errors = counter("errors", "Errors of verify-numba, each served by Triton instead.", "kind")
        self._mismatches = counter("mismatches", "Calls whose difference reached the threshold.", "tag")
        self._max_abs = gauge("max_abs_difference", "Largest absolute difference from Triton so far.", "tag")
        self._norm = gauge("relative_norm", "Relative norm of the difference from Triton so far.", "tag")
        self._plan = gauge("plan", "1 for the split plan in use.", "plan")
        self._seen: dict[tuple[str, ...], float] = {}

    def update(self, backends: list[Json]) -> None:
        for backend in backends:
            if "counters" in backend:
                self._update(backend)

    def _update(self, backend: Json) -> None:
        at = (backend["rank"], backend["mode"])
        counters = backend["counters"]
        self._plan.labels(*at, backend["plan"]).set(1)
        for tag in ("eager", "graph"):
            self._raise_to(self._calls, (*at, tag), counters[f"{tag}_calls"])
            for reason, count in counters["declines"][tag].items():
                self._raise_to(self._declines, (*at, tag, reason), count)
        for kind, count in counters["errors"].items():
            self._raise_to(self._errors, (*at, kind), count)
        for tag, found in (counters["validate"] or {}).items():
            if isinstance(found, dict):
                self._raise_to(self._mismatches, (*at, tag), found["mismatches"])
                self._max_abs.labels(*at, tag).set(found["max_abs"])
                self._norm.labels(*at, tag).set(found["relative_norm"])

    def _raise_to(self, counter: Any, labels: tuple[str, ...], value: float) -> None:
        key = (counter._name, *labels)
        step = value - self._seen.get(key, 0.0)
        if step > 0:
            counter.labels(*labels).inc(step)
            self._seen[key] = value
