"""Counters of one backend: what Python saw (launches, declines, errors) and what the device did (the board)."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from sglang_glue.board import MISMATCH, STATS, Board, Reading, Tag

Json = dict[str, Any]


class Counters:
    """Host counts, plus the board that counts executed steps. `layers` are layer numbers in board order."""

    def __init__(self, layers: list[int], board: Board) -> None:
        self.layers = layers
        self._board = board
        self._ours = {tag: Counter[int]() for tag in Tag}  # launches by layer; a graph counts once, when captured
        self._graph_sizes: dict[int, set[int]] = {}  # batch size of a captured graph -> layers of it that are ours
        self._declines = {tag: Counter[str]() for tag in Tag}
        self._errors: Counter[str] = Counter()

    def ours(self, tag: Tag, layer: int, bs: int) -> None:
        """Our kernel was launched (or put into a graph) for board row `layer`."""
        self._ours[tag][layer] += 1
        if tag is Tag.GRAPH:
            self._graph_sizes.setdefault(bs, set()).add(layer)

    def decline(self, tag: Tag, reason: str) -> None:
        """A verify call went to Triton because of `reason`."""
        self._declines[tag][reason] += 1

    def error(self, kind: str) -> bool:
        """Count an exception of ours; True the first time this kind is seen."""
        self._errors[kind] += 1
        return self._errors[kind] == 1

    def snapshot(self) -> Json:
        """Everything as JSON values. Makes no CUDA call; safe from any thread."""
        reading = self._board.read()
        return {
            "eager_calls": sum(_counts(self._ours[Tag.EAGER]).values()),
            "graph_calls": int(reading.steps[Tag.GRAPH]) * self._layers_in_graphs(),
            "steps": {tag.name.lower(): int(reading.steps[tag]) for tag in Tag},
            "layers": len(self.layers),
            "graphs": {str(bs): len(layers) for bs, layers in sorted(dict(self._graph_sizes).items())},
            "declines": {tag.name.lower(): _counts(self._declines[tag]) for tag in Tag},
            "errors": _counts(self._errors),
            "validate": self._validate(reading),
        }

    def _layers_in_graphs(self) -> int:
        # Every graph of a server holds the same layers; the smallest is the honest figure if one does not.
        return min((len(layers) for layers in dict(self._graph_sizes).values()), default=0)

    def _validate(self, reading: Reading) -> Json | None:
        if not reading.stats[..., STATS.index("calls")].any():
            return None
        found: Json = {tag.name.lower(): self._totals(reading.stats[tag]) for tag in Tag}
        found["recent_mismatches"] = [self._mismatch(row.tolist()) for row in reading.ring]
        return found

    def _totals(self, stats: Any) -> Json:
        column = {name: stats[:, i] for i, name in enumerate(STATS)}
        worst = int(column["max_rel"].argmax())
        sums = ("calls", "rows", "mismatches", "nan_ours", "nan_triton")
        triton = float(column["sq_triton"].sum())
        return {
            **{name: int(column[name].sum()) for name in sums},
            "relative_norm": math.sqrt(float(column["sq_diff"].sum()) / triton) if triton else 0.0,
            "max_abs": float(column["max_abs"].max()),
            "max_rel": float(column["max_rel"].max()),
            "worst_layer": self._layer(worst),
            "worst_prefix": int(column["worst_prefix"][worst]),
            "worst_bs": int(column["worst_bs"][worst]),
        }

    def _mismatch(self, row: list[float]) -> Json:
        values: Json = dict(zip(MISMATCH, row, strict=True))
        return {
            "tag": Tag(int(values["tag"])).name.lower(),
            "layer": self._layer(int(values["layer"])),
            "bs": int(values["bs"]),
            "prefix": int(values["prefix"]),
            "rel": values["rel"],
            "max_abs": values["max_abs"],
        }

    def _layer(self, row: int) -> int:
        return self.layers[row] if row < len(self.layers) else -1


def _counts(counter: Counter[Any]) -> dict[Any, int]:
    # dict() of a Counter is one C call, so a thread may take it while another counts.
    return dict(counter)
