"""A clock for pytest-benchmark that counts GPU time, so that its tables show what CUDA events measured."""

from __future__ import annotations

from typing import Any

_state: dict[str, Any] = {"start": None, "share": 1}


def calls_a_round(count: int) -> None:
    """A timed function holds so many calls; the clock runs that much slower, and tables show one call."""
    _state["share"] = count


def gpu_clock() -> float:
    """Seconds of GPU time since the first reading, divided by the calls in a round."""
    import torch

    now = torch.cuda.Event(enable_timing=True)
    now.record()
    now.synchronize()
    if _state["start"] is None:
        _state["start"] = now
    return float(_state["start"].elapsed_time(now)) / 1e3 / _state["share"]
