"""What one live run does, as plain values that travel to its process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

ALGORITHMS = ("ngram", "eagle", "none")
VOCABULARY = 64
TIMED_PREFIX_TOKENS = 2**19
"""Prefix tokens that the timed steps of one length read, about: bounds a kernel that takes as long as its prefix."""

FEWEST_TIMED_TOKENS = 8


@dataclass(frozen=True)
class LiveSpec:
    """The same for every mode of a comparison, so that only the mode differs."""

    algorithm: str
    layers: int
    heads: int  # of one rank
    hidden: int
    T: int  # draft tokens, root included
    topk: int  # EAGLE's; NGRAM has its own tree
    steps: int  # EAGLE's
    graphs: bool
    batch: int  # most requests at once
    churn: int  # batches of changing size and lengths
    churn_longest: int  # tokens of a prompt there, at most
    new_tokens: int
    lengths: tuple[int, ...]  # prompts whose verify steps are timed, one request at a time
    seed: int
    memory: float  # fraction of the GPU's memory for weights and KV pool
    tp: int = 1  # ranks
    repeat: int = 0  # times the same batch is generated, with an empty cache each time
    engine: tuple[tuple[str, Any], ...] = ()  # further arguments of the engine, over ours

    @property
    def longest_prompt(self) -> int:
        prompts = self.lengths if not self.churn and not self.repeat else (self.churn_longest, *self.lengths)
        return max(prompts, default=self.churn_longest)

    @property
    def context_length(self) -> int:
        """Room for the longest prompt, what it generates, and one draft more."""
        return self.longest_prompt + self.new_tokens + self.T + 64

    @property
    def pool_tokens(self) -> int:
        """Slots of the KV pool: the largest batch and a quarter, or the longest prompt and a bit.

        No more, since SGLang takes the free slot that has been free for longest: only a pool that has been gone
        through more than once gives out scattered slots.
        """
        request = self.churn_longest + self.new_tokens + 6 * self.T
        batch = 5 * self.batch * request // 4 if self.churn or self.repeat else 0
        return max(batch, self.context_length + 1024)

    def timed_tokens(self, length: int) -> int:
        """Tokens generated while the steps behind `length` tokens are timed: fewer, the longer the prefix."""
        return max(min(self.new_tokens, TIMED_PREFIX_TOKENS // length), min(FEWEST_TIMED_TOKENS, self.new_tokens))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LiveSpec:
        values: dict[str, Any] = json.loads(text)
        engine = tuple((name, value) for name, value in values["engine"])
        return cls(**{**values, "lengths": tuple(values["lengths"]), "engine": engine})
