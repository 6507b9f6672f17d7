"""Masks of draft trees: cell (i, j) says whether draft token i sees draft token j."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

KINDS = ("tree", "shuffled", "chain", "star", "dense", "random")


def ancestors(parents: list[int]) -> Array:
    """[t, t] bool: each token sees itself and its ancestors. ``parents[i]`` is -1 for a root; any order."""
    t = len(parents)
    mask = np.zeros((t, t), dtype=np.bool_)
    for i in range(t):
        j = i
        while j >= 0:
            mask[i, j] = True
            j = parents[j]
    return mask


def tree_mask(rng: np.random.Generator, t: int, kind: str = "tree", blind: float = 0.0) -> Array:
    """A mask for ``t`` draft tokens; ``blind`` is the share of rows that see nothing.

    ``tree``: random, parents before children. ``shuffled``: the same, renumbered, so that parents may come
    after their children. ``chain``, ``star``, ``dense`` (all see all), ``random`` (any cells at all).
    """
    if kind in ("tree", "shuffled"):
        mask = ancestors([-1, *(int(rng.integers(i)) for i in range(1, t))][:t])
        if kind == "shuffled":
            order = rng.permutation(t)
            mask = mask[order][:, order]
    elif kind == "chain":
        mask = np.tri(t, dtype=np.bool_)
    elif kind == "star":
        mask = ancestors([-1, *[0] * (t - 1)][:t])
    elif kind == "dense":
        mask = np.ones((t, t), dtype=np.bool_)
    elif kind == "random":
        mask = rng.random((t, t)) < 0.5
    else:
        raise ValueError(f"tree: found {kind}, expected one of {', '.join(KINDS)}")
    mask[rng.random(t) < blind] = False
    return mask
