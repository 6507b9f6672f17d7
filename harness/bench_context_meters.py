"""What the GPU reports of itself while a server decodes, through NVML.

GPU utilisation is the share of time in which any kernel ran: a stalled kernel counts as busy. The memory
controller's share and the power tell a GPU that works from one that waits.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

INTERVAL_S = 0.05


class MetersMissing(Exception):
    """NVML cannot be used here; the message says why."""


@dataclass(frozen=True)
class Reading:
    """One sample: seconds on the monotonic clock, per cent, per cent, watts; the mean over the GPUs asked for."""

    at: float
    gpu_percent: float
    memory_percent: float
    power_w: float


class Gauge(Protocol):
    """Something that can be read at any time."""

    def read(self) -> Reading: ...

    def name(self) -> str: ...


class Nvml:
    """The GPUs with these NVML indices. Raises MetersMissing."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._nvml = _load()
        try:
            self._nvml.nvmlInit()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        except self._nvml.NVMLError as error:
            raise MetersMissing(f"NVML: {error}") from error

    def read(self) -> Reading:
        rates = [self._nvml.nvmlDeviceGetUtilizationRates(handle) for handle in self._handles]
        watts = [self._nvml.nvmlDeviceGetPowerUsage(handle) / 1e3 for handle in self._handles]
        return Reading(
            time.monotonic(),
            statistics.fmean(rate.gpu for rate in rates),
            statistics.fmean(rate.memory for rate in rates),
            statistics.fmean(watts),
        )

    def name(self) -> str:
        """Name of the first GPU."""
        name = self._nvml.nvmlDeviceGetName(self._handles[0])
        return name.decode() if isinstance(name, bytes) else str(name)


class Recorder:
    """Reads a gauge in a thread of its own between `with` and its end."""

    def __init__(self, gauge: Gauge | None, interval: float = INTERVAL_S) -> None:
        self._gauge, self._interval = gauge, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-meters", daemon=True)
        self.readings: list[Reading] = []
        self.failure = ""

    def __enter__(self) -> Self:
        if self._gauge:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._gauge:
            self._thread.join()

    def between(self, start: float, end: float) -> dict[str, float | None]:
        """Means of the readings in that stretch of time; None where there is none."""
        inside = [r for r in self.readings if start <= r.at <= end]
        names = ("gpu_percent", "memory_percent", "power_w")
        return {
            name: statistics.fmean(getattr(r, name) for r in inside) if inside else None for name in names
        }

    def _run(self) -> None:
        assert self._gauge is not None
        while not self._stop.wait(self._interval):
            try:
                self.readings.append(self._gauge.read())
            except Exception as error:  # noqa: BLE001 - NVML's own error type is only known where NVML is
                self.failure = f"{type(error).__name__}: {error}"
                return


def _load() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise MetersMissing("nvidia-ml-py is not installed") from error
