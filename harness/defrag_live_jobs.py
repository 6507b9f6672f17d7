"""The requests of a live defragmentation run: what the simulator draws, as prompts of a small Markov chain."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from harness.defrag_trace import drawn
from harness.live_prompts import MarkovChain
from harness.live_spec import LiveSpec


@dataclass(frozen=True)
class Job:
    """One request; ``abort``: generated tokens after which the client goes away, or None."""

    prompt: list[int]
    new_tokens: int
    abort: int | None


def jobs_of(spec: LiveSpec) -> list[Job]:
    """The spec's ``churn`` requests of up to ``churn_longest`` tokens: long and short, two in three with a prefix
    that others share, one in twelve aborted. The same spec gives the same requests."""
    chain = MarkovChain(spec.seed)
    found = []
    for number, one in enumerate(islice(drawn(spec.seed, spec.churn_longest, 1.0), spec.churn)):
        shared = chain.text(one.shared, spec.seed + one.family) if one.shared else []
        own = chain.text(one.prompt - one.shared, spec.seed + 1000 + number)
        found.append(Job([*shared, *own], min(one.output, spec.new_tokens), one.abort))
    return found
