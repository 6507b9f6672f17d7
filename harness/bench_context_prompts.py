"""Prompts of an exact length in tokens, none of which shares a prefix with another."""

from __future__ import annotations

import random

PERIOD = 24
NONCE = 8
"""Tokens at the start that differ between any two prompts, so that the prefix cache holds none of them."""
FIRST_TOKEN = 16
"""Ids below are control tokens in most vocabularies."""

TEXTS = ("random", "predictable")


def make_prompt(kind: str, length: int, vocabulary: int, seed: int) -> list[int]:
    """`length` token ids below `vocabulary`.

    "random" repeats nothing, so that hardly a draft token is accepted; "predictable" repeats one short phrase, so
    that nearly all are. The difference in tokens a second is draft acceptance, the time of a step is the kernels.
    """
    rng = random.Random(f"{seed}/{length}/{kind}")
    first = min(FIRST_TOKEN, vocabulary - 1)
    if kind == "random":
        return [rng.randrange(first, vocabulary) for _ in range(length)]
    phrase = [rng.randrange(first, vocabulary) for _ in range(PERIOD)]
    nonce = [rng.randrange(first, vocabulary) for _ in range(min(NONCE, length))]
    rest = length - len(nonce)
    return nonce + (phrase * (rest // PERIOD + 1))[:rest]
