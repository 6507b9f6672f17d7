"""What one live run does, as plain values that travel to its process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

ALGORITHMS = ("ngram", "eagle", "none")
VOCABULARY = 64


@dataclass(frozen=True)
class LiveSpec:
    """The same for every mode of a comparison, so that only the mode differs."""

    algorithm: str
    layers: int
    heads: int
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

    @property
    def context_length(self) -> int:
        """Room for the longest prompt, what it generates, and one draft more."""
        longest = max((self.churn_longest, *self.lengths))
        return longest + self.new_tokens + self.T + 64

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LiveSpec:
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "lengths": tuple(values["lengths"])})
