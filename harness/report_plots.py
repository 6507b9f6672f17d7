"""Pictures of benchmark results: those by prefix length, and the sweeps of splits and slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.report_length_plots import length_pictures
from harness.report_load import Record, ResultFile
from harness.report_style import FLOOR, INK, US, Picture, legend, log_values, new_figure, short


def bench_pictures(file: ResultFile) -> Iterator[Picture]:
    """Every picture that this result has the data for; the picture for the README comes first."""
    yield from length_pictures(file)
    yield from _sweep(file, "splits", _SPLITS, _split_groups(file.records), _splits)
    yield from _sweep(file, "slots", _SLOTS, _slot_groups(file.records), _slots)


_SPLITS = "Time by number of splits of the prefix; the dashed line is the plan's own choice."
_SLOTS = "Time by length of the runs in which a request's slots lie, relative to contiguous slots."


def _split_groups(records: Sequence[Record]) -> dict[str, list[Record]]:
    groups = defaultdict(list)
    for r in records:
        if r["run_length"] == 1:
            groups[_shape_label(r)].append(r)
    return {label: rows for label, rows in groups.items() if len({r["nsplit"] for r in rows}) > 2}


def _slot_groups(records: Sequence[Record]) -> dict[str, list[Record]]:
    groups = defaultdict(list)
    for r in records:
        if r["nsplit"] is None:
            groups[_shape_label(r)].append(r)
    return {label: rows for label, rows in groups.items() if {0, 1} <= {r["run_length"] for r in rows}}


def _shape_label(r: Record) -> str:
    lengths = r["lengths"]
    length = short(lengths[0]) if len(set(lengths)) == 1 else f"{sum(lengths)} mixed"
    return f"H {r['H']}, T {r['T']}, {r['bs']} x {length}, {r['mode']}"


def _sweep(
    file: ResultFile,
    name: str,
    caption: str,
    groups: dict[str, list[Record]],
    draw: Callable[[dict[str, list[Record]], str], Figure],
) -> Iterator[Picture]:
    if groups:
        yield Picture(name, caption, draw(groups, file.machine))


def _splits(groups: dict[str, list[Record]], machine: str) -> Figure:
    figure, (ax,) = new_figure("Time by number of splits", f"scattered slots, cold latents; {machine}")
    for label, rows in groups.items():
        fixed = sorted((r["nsplit"], r["us"]) for r in rows if r["nsplit"] is not None)
        (line,) = ax.plot(*zip(*fixed, strict=True), marker="o", markersize=4, label=label)
        for auto in (r for r in rows if r["nsplit"] is None):
            ax.axhline(auto["us"], color=line.get_color(), linewidth=0.9, linestyle="--")
    ax.plot([], [], color=FLOOR, linewidth=0.9, linestyle="--", label="the plan's own choice")
    ax.set_xscale("log", base=2)
    _plain_ticks(ax, sorted({r["nsplit"] for rows in groups.values() for r in rows if r["nsplit"]}))
    log_values(ax, US)
    ax.set_xlabel("splits", color=INK)
    legend(ax)
    return figure


def _slots(groups: dict[str, list[Record]], machine: str) -> Figure:
    figure, (ax,) = new_figure(
        "Scattered against contiguous slots", f"time relative to contiguous; {machine}"
    )
    runs = sorted(
        {r["run_length"] for rows in groups.values() for r in rows}, key=lambda run: (run == 0, run)
    )
    width = 0.8 / len(groups)
    for position, (label, rows) in enumerate(groups.items()):
        by_run = {r["run_length"]: r["us"] for r in rows}
        places = [i for i, run in enumerate(runs) if run in by_run]
        heights = [100 * by_run[runs[i]] / by_run[0] - 100 for i in places]
        offset = (position - (len(groups) - 1) / 2) * width
        bars = ax.bar([i + offset for i in places], heights, width * 0.92, label=label)
        ax.bar_label(bars, fmt="%+.1f", fontsize=7, padding=2, color=INK)
    ax.axhline(0, color=INK, linewidth=0.8)
    names = {0: "contiguous", 1: "scattered"}
    ax.set_xticks(range(len(runs)), [names.get(run, f"runs of {run}") for run in runs])
    ax.set_ylabel("per cent more time", color=INK)
    ax.margins(y=0.15)
    legend(ax)
    return figure


def _plain_ticks(ax: Axes, ticks: Sequence[int]) -> None:
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
