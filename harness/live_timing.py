"""Milliseconds a verify step behind a prefix of some length, seen from outside the engine."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

from harness.live_engine import greedy
from harness.live_prompts import timed_prompt
from harness.live_spec import LiveSpec

ENOUGH_S = 2.0
MOST_SAMPLES = 5

Json = dict[str, Any]


class Sample(NamedTuple):
    """One streamed answer: its tokens, its verify steps after the first chunk, and how long these took."""

    tokens: list[int]
    steps: int
    seconds: float


def time_length(engine: Any, spec: LiveSpec, length: int) -> Json:
    """Time the verify steps behind `length` tokens: the median of a few answers.

    The first request fills the prefix cache. In those that follow, the clock starts at the first chunk, so that
    neither the prefill nor the forward of the one prompt token that is never cached is counted.
    """
    prompt = timed_prompt(spec, length)
    started = time.perf_counter()
    engine.generate(input_ids=prompt, sampling_params=greedy(1))
    prefilled = time.perf_counter()
    samples: list[Sample] = []
    while not samples or (len(samples) < MOST_SAMPLES and time.perf_counter() - prefilled < ENOUGH_S):
        samples.append(stream(engine, prompt, spec.timed_tokens(length)))
    timed = [1000 * s.seconds / s.steps for s in samples if s.steps]
    return {
        "length": length,
        "steps": sum(s.steps for s in samples),
        "samples": len(samples),
        "ms_per_step": statistics.median(timed) if timed else None,
        "prefill_s": prefilled - started,
        "tokens": samples[0].tokens,
    }


def stream(engine: Any, prompt: list[int], new_tokens: int) -> Sample:
    """One answer, chunk by chunk."""
    first: tuple[float, int] | None = None
    seen, steps, tokens = 0.0, 0, []
    for chunk in engine.generate(input_ids=prompt, sampling_params=greedy(new_tokens), stream=True):
        seen = time.perf_counter()
        steps = int(chunk["meta_info"].get("spec_verify_ct") or 0)
        tokens = chunk["output_ids"]
        first = first or (seen, steps)
    if first is None:
        raise RuntimeError("the engine streamed no chunk")
    return Sample(list(tokens), steps - first[1], seen - first[0])
