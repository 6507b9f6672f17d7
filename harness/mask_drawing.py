"""Draws draft trees and masks with rich."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from harness.terminal import Glyphs
from harness.trees import Forest

WIDE_UP_TO = 24
"""Largest mask drawn with a space between columns; larger ones need the width."""
LEVEL_COLUMNS = 4
"""Columns that rich indents a level by."""
LABEL_COLUMNS = 12


def draw_forest(forest: Forest, positions: Sequence[int], width: int) -> RenderableType:
    """The draft tokens of one request under their parents, each with its sequence position.

    A forest deeper than `width` columns can hold is given as a list of parents.
    """
    roots = forest.roots
    count = "tree" if len(roots) == 1 else f"forest of {len(roots)} roots"
    if LEVEL_COLUMNS * forest.depth + LABEL_COLUMNS > width:
        pairs = ", ".join(f"{i}<{'root' if p < 0 else p}" for i, p in enumerate(forest.parents))
        return Text(f"{count} of depth {forest.depth}; token<parent: {pairs}")
    trees = [_grow(Tree(_label(root, positions)), forest, root, positions) for root in roots]
    return Group(Text(f"{count} of depth {forest.depth} (token @position)", style="dim"), *trees)


def draw_mask(mask: NDArray[np.bool_], glyphs: Glyphs) -> RenderableType:
    """A [T, T] mask: one line a draft token, one column a draft key."""
    T = len(mask)
    gap = " " if T <= WIDE_UP_TO else ""
    margin = len(str(T - 1))
    ruler = gap.join(str(j % 10) for j in range(T))
    lines = [
        Text("mask (row: draft token, column: draft key that it sees)", style="dim"),
        Text(f"{'':>{margin}} {ruler}", style="dim", no_wrap=True),
    ]
    for i, row in enumerate(mask):
        cells = gap.join(glyphs.seen if cell else glyphs.hidden for cell in row)
        lines.append(Text.assemble((f"{i:>{margin}} ", "dim"), cells, no_wrap=True))
    return Group(*lines)


def _label(token: int, positions: Sequence[int]) -> str:
    return f"{token} @{positions[token]}"


def _grow(tree: Tree, forest: Forest, token: int, positions: Sequence[int]) -> Tree:
    for child in forest.children(token):
        _grow(tree.add(_label(child, positions)), forest, child, positions)
    return tree
