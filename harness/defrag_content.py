"""What the rows of the simulated pool hold, so that a lost or misplaced token is seen.

The row of a token is a function of its whole prefix, as real KV rows are: a polynomial hash of the tokens up to it,
times an odd number for each layer. A row that was moved wrongly, overwritten or left behind has another value.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sglang_glue.defrag.runs import Slots

Tokens = NDArray[np.int64]
Hash = NDArray[np.uint64]

LAYERS = 3
"""Layer buffers of the simulated pools: two of the model, one of the draft model."""
WORDS = 2
"""64-bit words of a row: the mover's smallest, 16 bytes."""


class ContentError(AssertionError):
    """A token's row does not hold what was written for it."""


class Content:
    """Layer buffers [slots + 1, WORDS] uint64, and the values that belong in them."""

    def __init__(self, layers: list[NDArray[np.uint64]], max_context: int) -> None:
        self.layers = layers
        rng = np.random.default_rng(99)
        self._powers = rng.integers(1, 1 << 63, max_context + 1, np.uint64) | np.uint64(1)
        self._layer_keys = [np.uint64(2 * i + 3) for i in range(len(layers))]

    def hashes(self, tokens: Tokens, at: int = 0, before: int = 0) -> Hash:
        """The value of each token [n] that stands at position ``at`` onwards, after a prefix of value ``before``."""
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[at : at + tokens.size]
        return np.cumsum(terms, dtype=np.uint64) + np.uint64(before)

    def write(self, slots: Slots, values: Hash) -> None:
        """Write rows, in every layer."""
        for layer, key in zip(self.layers, self._layer_keys, strict=True):
            layer[slots] = (values * key)[:, None]

    def expect(self, what: str, slots: Slots, values: Hash) -> None:
        """Raise ContentError unless the rows hold these values."""
        for i, (layer, key) in enumerate(zip(self.layers, self._layer_keys, strict=True)):
            wrong = (layer[slots] != (values * key)[:, None]).any(axis=1)
            if wrong.any():
                at = int(wrong.argmax())
                raise ContentError(
                    f"{what}: token {at} of {slots.size} reads slot {int(slots[at])}, layer {i}, "
                    f"which holds another row ({int(wrong.sum())} tokens are wrong)"
                )

    def expect_tree(self, stretches: Iterable[tuple[int, Tokens, Slots]]) -> None:
        """Check cached stretches (index of the parent or -1, tokens, slots), parents first."""
        ends: list[tuple[int, int]] = []
        for i, (parent, tokens, slots) in enumerate(stretches):
            before, depth = ends[parent] if parent >= 0 else (0, 0)
            values = self.hashes(tokens, depth, before)
            self.expect(f"cached stretch {i}", slots, values)
            ends.append((int(values[-1]), depth + tokens.size))
