"""A clock for pytest-benchmark that counts GPU time, so that its tables show what CUDA events measured."""

from __future__ import annotations

from typing import Any

_state: dict[str, Any] = {"last": None, "seconds": 0.0, "share": 1}


def calls_a_round(count: int) -> None:
    """A timed function holds so many calls; the clock runs that much slower, and tables show one call."""
    _state["share"] = count


def gpu_clock() -> float:
    """Seconds of GPU time since the first reading, divided by the calls in a round.

    Summed from reading to reading: events give their distance as float32 milliseconds, which over minutes would be
    coarser than what is timed.
    """
    import torch

    now = torch.cuda.Event(enable_timing=True)
    now.record()
    now.synchronize()
    if _state["last"] is not None:
        _state["seconds"] += _state["last"].elapsed_time(now) / 1e3
    _state["last"] = now
    return float(_state["seconds"]) / float(_state["share"])
