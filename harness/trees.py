"""Reads the draft tree back from an attention mask.

A draft token of a tree sees its ancestors and itself, and nothing else. So a T x T mask is a forest exactly
when every row sees itself and, where it sees more, one of those others sees just them: its parent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Forest:
    """Parents of the draft tokens of one request; -1 marks a root."""

    parents: tuple[int, ...]

    @property
    def roots(self) -> list[int]:
        return self.children(-1)

    def children(self, token: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == token]

    @property
    def depth(self) -> int:
        """Tokens on the longest path from a root."""
        return max((len(self.path(i)) for i in range(len(self.parents))), default=0)

    def path(self, token: int) -> list[int]:
        """From the root down to `token`."""
        path = []
        while token >= 0:
            path.append(token)
            token = self.parents[token]
        return path[::-1]


def infer_forest(mask: NDArray[np.bool_]) -> Forest | None:
    """The forest that a [T, T] mask describes, or None if the mask is no forest."""
    visible = [frozenset(map(int, np.flatnonzero(row))) for row in mask]
    token_of = {seen: i for i, seen in enumerate(visible)}
    if len(token_of) != len(visible):
        return None  # two rows that see the same: at most one of them can be the last of its path
    parents = []
    for i, seen in enumerate(visible):
        rest = seen - {i}
        parent = token_of.get(rest, -1)
        if i not in seen or (rest and (parent < 0 or parent not in rest)):
            return None
        parents.append(parent if rest else -1)
    return Forest(tuple(parents))


def parent_after_child(mask: NDArray[np.bool_]) -> bool:
    """Whether a token sees one with a larger index; SGLang's Triton kernel does not look that far."""
    return bool(np.triu(mask, 1).any())
