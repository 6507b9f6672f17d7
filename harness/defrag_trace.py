"""Arrivals for the server that `defrag` simulates: drawn from a seed, or read from a trace file.

A trace is JSON Lines, one arrival a line, ascending in ``at``:

    {"at": 12, "prompt": 800, "output": 150, "family": 3, "shared": 512, "abort": null}

``at`` scheduler step; ``prompt`` and ``output`` tokens; the first ``shared`` prompt tokens are those of all requests
of the same ``family`` (0: none); ``abort``: output tokens after which the client goes away, or null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UsageError

FAMILIES = 6


@dataclass(frozen=True)
class Arrival:
    """One request as the client sends it."""

    at: int
    prompt: int
    output: int
    family: int = 0
    shared: int = 0
    abort: int | None = None


def drawn(seed: int, max_context: int, load: float) -> Iterator[Arrival]:
    """Endless arrivals: log-normal lengths, two in three with a shared prefix, one in twelve aborted.

    ``load`` is the mean number of arrivals a scheduler step.
    """
    rng = np.random.default_rng([seed, 1])
    now = 0.0
    while True:
        now += rng.exponential(1.0 / load)
        prompt = int(np.clip(rng.lognormal(np.log(max_context / 8), 0.8), 8, max_context * 0.6))
        output = int(np.clip(rng.lognormal(np.log(max_context / 24), 0.7), 4, max_context * 0.25))
        family = int(rng.integers(1, FAMILIES + 1)) if rng.random() < 2 / 3 else 0
        shared = int(prompt * rng.uniform(0.3, 0.9)) if family else 0
        abort = int(rng.integers(0, output)) if rng.random() < 1 / 12 else None
        yield Arrival(int(now), prompt, output, family, shared, abort)


def read_trace(path: str, max_context: int) -> list[Arrival]:
    """Read a trace file. Raises UsageError naming the line and the field."""
    arrivals: list[Arrival] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        arrival = _arrival(f"{path}, line {number}", line)
        if arrival.prompt + arrival.output > max_context:
            raise UsageError(
                f"{path}, line {number}: prompt + output is {arrival.prompt + arrival.output} tokens, "
                f"expected at most the context of {max_context} (--context)"
            )
        if arrivals and arrival.at < arrivals[-1].at:
            raise UsageError(
                f"{path}, line {number}: at is {arrival.at}, expected at least {arrivals[-1].at}"
            )
        arrivals.append(arrival)
    if not arrivals:
        raise UsageError(f"{path}: holds no arrivals")
    return arrivals


def _arrival(where: str, line: str) -> Arrival:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise UsageError(f"{where}: found {type(record).__name__}, expected an object")
    unknown = set(record) - {"at", "prompt", "output", "family", "shared", "abort"}
    if unknown:
        raise UsageError(f"{where}: unknown field {min(unknown)!r}")
    abort = record.get("abort")
    prompt = _number(where, record, "prompt", 1)
    shared = _number(where, record, "shared", 0, 0)
    if shared > prompt:
        raise UsageError(f"{where}: shared is {shared}, expected at most the prompt's {prompt} tokens")
    return Arrival(
        at=_number(where, record, "at", 0),
        prompt=prompt,
        output=_number(where, record, "output", 1),
        family=_number(where, record, "family", 0, 0),
        shared=shared,
        abort=None if abort is None else _number(where, record, "abort", 0),
    )


def _number(where: str, record: dict[str, Any], name: str, least: int, default: int | None = None) -> int:
    value = record.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{where}: {name} is {value!r}, expected an integer of at least {least}")
    return value
