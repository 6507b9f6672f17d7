"""Colours, markers and axes shared by all pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

OURS = "verify-numba"
ACCENT, INK, GRID, FLOOR = "#c2410c", "#1f2937", "#e5e7eb", "#6b7280"
PEER_LOOK = {
    "sglang-triton": ("#1d4ed8", "s"),
    "sglang-splitkv": ("#0891b2", "D"),
    "sglang-sharedkv": ("#0e7490", "d"),
    "flashinfer-fa2": ("#15803d", "^"),
    "flashinfer-fa3": ("#65a30d", "v"),
    "flashmla": ("#7c3aed", "P"),
    "torch": ("#9ca3af", "X"),
}
SPARE_LOOKS = (("#be185d", "*"), ("#a16207", "p"), ("#475569", "h"))
PALETTE = ("#1d4ed8", "#c2410c", "#15803d", "#7c3aed", "#0891b2", "#a16207", "#be185d", "#475569")
SHORT_RANGE = 1000
DPI = 160
SIZE = (8.0, 4.8)
US = "microseconds a layer"


@dataclass(frozen=True)
class Picture:
    """A drawn figure with the file name it gets and the sentence that goes under it."""

    name: str
    caption: str
    figure: Figure


def new_figure(title: str, subtitle: str, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with a heading and one row of axes."""
    figure = Figure(
        figsize=(SIZE[0] * (1 if columns == 1 else 0.72 * columns), SIZE[1]), layout="constrained"
    )
    axes = figure.subplots(1, columns, squeeze=False)[0]
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes[0].set_title(subtitle, loc="left", fontsize=9, color=FLOOR)
    for ax in axes:
        ax.set_prop_cycle(color=PALETTE)
        ax.grid(True, which="major", color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(colors=INK, labelsize=9)
    return figure, list(axes)


def look(name: str) -> dict[str, Any]:
    """Line style of a contender; ours stands out."""
    if name == OURS:
        return {"color": ACCENT, "marker": "o", "linewidth": 2.6, "markersize": 6, "zorder": 5}
    known = list(PEER_LOOK)
    colour, marker = PEER_LOOK.get(name, SPARE_LOOKS[(sum(map(ord, name)) + len(known)) % len(SPARE_LOOKS)])
    return {"color": colour, "marker": marker, "linewidth": 1.4, "markersize": 5, "zorder": 3}


def in_order(names: Iterable[str]) -> list[str]:
    """Ours first, then the known peers as listed here, then the rest."""
    known = [OURS, *PEER_LOOK]
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def length_axis(ax: Axes, lengths: Iterable[int]) -> None:
    """Logarithmic axis of prefix lengths with a tick at each measured one; 0 has its place at the left."""
    ticks = sorted(set(lengths))
    positive = [length for length in ticks if length > 0]
    if not positive:
        return
    least, most = positive[0], positive[-1]
    if ticks[0] == 0:
        ax.set_xscale("symlog", linthresh=least, linscale=0.4)
        ax.set_xlim(-least / 5, most * 1.35)
    else:
        ax.set_xscale("log")
        ax.set_xlim(least / 1.25, most * 1.35)
    ax.xaxis.set_major_locator(FixedLocator(_spread_out(ticks)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    ax.set_xlabel("prefix tokens a request", color=INK)


def log_values(ax: Axes, label: str) -> None:
    """Logarithmic values with plain numbers; 2 and 5 are marked too where the range is short."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < SHORT_RANGE else (1,)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel(label, color=INK)


def legend(ax: Axes, lines: Sequence[Artist] | None = None, labels: Sequence[str] | None = None) -> None:
    """Beside the axes, so that it never hides a line; of all that these axes show, or of what is given."""
    handles = {} if lines is None else {"handles": lines, "labels": labels}
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, **handles)


def short(value: float) -> str:
    """4096 -> 4k, 131072 -> 128k, 185000 -> 185k."""
    if value < 1000:
        return f"{value:g}"
    if value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value / 1000:g}k"


def _spread_out(ticks: list[int]) -> list[int]:
    """Leave out ticks whose labels would touch: nearer than a factor of 1.6 to the one kept before."""
    kept: list[int] = []
    for tick in reversed(ticks):
        if not kept or tick == 0 or kept[-1] / tick > 1.6:
            kept.append(tick)
    return kept[::-1]
