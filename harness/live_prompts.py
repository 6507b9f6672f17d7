"""Prompts of a small Markov chain: they repeat themselves, so that n-gram speculation draws branching trees."""

from __future__ import annotations

import math
import random

from harness.live_spec import VOCABULARY, LiveSpec

FIRST_WORD = 2  # 0 and 1 are the ends of a text
FOLLOWERS = 2


class MarkovChain:
    """Every token has the same few followers; one seed, one chain."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        words = range(FIRST_WORD, VOCABULARY)
        self._next = {word: draw.sample(words, FOLLOWERS) for word in words}

    def text(self, length: int, seed: int) -> list[int]:
        """`length` tokens."""
        draw = random.Random(seed)
        tokens = [draw.randrange(FIRST_WORD, VOCABULARY)]
        while len(tokens) < length:
            tokens.append(draw.choice(self._next[tokens[-1]]))
        return tokens


def churn_batches(spec: LiveSpec) -> list[list[list[int]]]:
    """Batches of 1 to `spec.batch` prompts of all lengths; run one after another they scatter the free list."""
    draw, chain = random.Random(spec.seed), MarkovChain(spec.seed)
    batches = []
    for number in range(spec.churn):
        size = 1 + number % spec.batch
        lengths = [int(2 ** draw.uniform(3, math.log2(spec.churn_longest))) for _ in range(size)]
        batches.append([chain.text(length, draw.getrandbits(32)) for length in lengths])
    return batches


def timed_prompt(spec: LiveSpec, length: int) -> list[int]:
    """The prompt of one timed length."""
    return MarkovChain(spec.seed).text(length, spec.seed + length)


def repeated_batch(spec: LiveSpec) -> list[list[int]]:
    """The one batch that is generated again and again: as many requests as fit, of many lengths."""
    chain, most = MarkovChain(spec.seed), spec.churn_longest
    return [chain.text(max(8, most >> shift % 6), spec.seed + shift) for shift in range(spec.batch)]
