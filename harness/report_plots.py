"""Pictures of benchmark results: time, bandwidth, speed-up, splits, slots, error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.report_load import Record, ResultFile
from harness.report_style import (
    FLOOR,
    INK,
    OURS,
    in_order,
    legend,
    length_axis,
    log_values,
    look,
    new_figure,
    short,
)

UNIT_ROUNDOFF = 2.0**-9
"""Half a bf16 ulp, relative: the most that rounding one number to bf16 changes it."""
US = "microseconds a layer"


@dataclass(frozen=True)
class Picture:
    """A drawn figure with the file name it gets and the sentence that goes under it."""

    name: str
    caption: str
    figure: Figure


def bench_pictures(file: ResultFile) -> Iterator[Picture]:
    """Every picture that this result has the data for; the picture for the README comes first."""
    families = _families(file.records)
    for (H, T, bs, mode), records in families.items():
        if len({r["lengths"][0] for r in records}) < 2:
            continue
        shape = f"H {H}, T {T}, bs {bs}, {mode}, scattered slots, cold latents; {file.machine}"
        tag = f"h{H}-t{T}-bs{bs}-{mode}"
        yield Picture(f"time-{tag}", _TIME, _time(records, shape))
        yield Picture(f"bandwidth-{tag}", _BANDWIDTH, _bandwidth(records, shape, file))
        if any(r["peers"] for r in records):
            yield Picture(f"speedup-{tag}", _SPEEDUP, _speedup(records, shape))
        yield Picture(f"error-{tag}", _ERROR, _error(records, shape))
    yield from _sweep(file, "splits", _SPLITS, _split_groups(file.records), _splits)
    yield from _sweep(file, "slots", _SLOTS, _slot_groups(file.records), _slots)


_TIME = "Time of one verify step of one layer by prefix length, with the time its bytes and operations take at least."
_BANDWIDTH = "Latent bytes a second by prefix length, counting every row once; the line is the measured read bandwidth."
_SPEEDUP = "How many times longer each peer takes, timed in the same run and the same mode."
_ERROR = "Error against float64 by prefix length, with the limit each run was held to and half a bf16 ulp."
_SPLITS = "Time by number of splits of the prefix; the dashed line is the plan's own choice."
_SLOTS = "Time by length of the runs in which a request's slots lie, relative to contiguous slots."


def _families(records: Sequence[Record]) -> dict[tuple[int, int, int, str], list[Record]]:
    """Length sweeps: equal lengths, scattered, default plan; the largest family first, sorted by length."""
    families: dict[tuple[int, int, int, str], list[Record]] = defaultdict(list)
    for r in records:
        if (
            r["run_length"] == 1
            and r["nsplit"] is None
            and r["form"] == "auto"
            and len(set(r["lengths"])) == 1
        ):
            families[r["H"], r["T"], r["bs"], r["mode"]].append(r)
    ordered = sorted(families.items(), key=lambda item: -len(item[1]))
    return {key: sorted(rows, key=lambda r: r["lengths"][0]) for key, rows in ordered}


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


def _time(records: Sequence[Record], subtitle: str) -> Figure:
    figure, (ax,) = new_figure("Verify attention: time by prefix length", subtitle)
    lengths = _lengths(records)
    for name, points in _series(records, "us").items():
        ax.plot(*zip(*points, strict=True), label=name, **look(name))
    filled = [r for r in records if r["lengths"][0]]
    for name, dash in (("bytes", "--"), ("flops", ":")):
        floors = [r[f"floor_{name}_us"] for r in filled]
        ax.plot(_lengths(filled), floors, dash, color=FLOOR, label=f"floor: {name}")
    log_values(ax, US)
    length_axis(ax, lengths)
    legend(ax)
    return figure


def _bandwidth(records: Sequence[Record], subtitle: str, file: ResultFile) -> Figure:
    figure, (ax,) = new_figure("Latent bandwidth by prefix length", subtitle)
    records = [r for r in records if r["lengths"][0]]
    for name, points in _series(records, "gbps").items():
        ax.plot(*zip(*points, strict=True), label=name, **look(name))
    ceiling = (file.result.get("ceilings") or {}).get("read_bytes_per_s")
    if ceiling:
        ax.axhline(ceiling / 1e9, color=FLOOR, linestyle="--", label=f"measured read: {ceiling / 1e9:,.0f}")
    log_values(ax, "GB/s")
    length_axis(ax, _lengths(records))
    legend(ax)
    return figure


def _speedup(records: Sequence[Record], subtitle: str) -> Figure:
    figure, (ax,) = new_figure("Peers' time over ours", subtitle)
    for name, points in _series(records, "ratio").items():
        if name != OURS:
            ax.plot(*zip(*points, strict=True), label=name, **look(name))
            x, y = points[-1]
            ax.annotate(f"{y:.3g}x", (x, y), (7, -3), textcoords="offset points", fontsize=8, color=INK)
    ax.axhline(1, color=FLOOR, linestyle="--", label="as fast as ours")
    log_values(ax, "peer's time / ours")
    length_axis(ax, _lengths(records))
    ax.margins(x=0.09)
    legend(ax)
    return figure


def _error(records: Sequence[Record], subtitle: str) -> Figure:
    figure, (ax,) = new_figure("Error against float64 by prefix length", subtitle)
    lengths = _lengths(records)
    checks = [r["check"] for r in records]
    for value, name, dash in (("worst_row", "worst row", "--"), ("rel_norm", "whole output", ":")):
        limits = [1e3 * c[f"{value}_limit"] for c in checks]
        ax.plot(lengths, limits, dash, color=FLOOR, label=f"limit, {name}")
        style = look(OURS if value == "worst_row" else "sglang-triton")
        ax.plot(lengths, [1e3 * c[value] for c in checks], label=name, **style)
    ax.axhline(1e3 * UNIT_ROUNDOFF, color=INK, linewidth=0.8, label="half a bf16 ulp")
    ax.set_ylim(bottom=0)
    ax.set_ylabel("relative error (2-norm), thousandths", color=INK)
    length_axis(ax, lengths)
    legend(ax)
    return figure


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


def _series(records: Sequence[Record], value: str) -> dict[str, list[tuple[int, float]]]:
    """Ours and each timed peer: (prefix length, `us`, `gbps` or `ratio`)."""
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for r in records:
        times = {OURS: r["us"]} | {n: p["us"] for n, p in r["peers"].items() if p.get("us") is not None}
        for name, us in times.items():
            values = {"us": us, "gbps": r["bytes"] / us / 1e3, "ratio": us / r["us"]}
            series[name].append((r["lengths"][0], values[value]))
    return {name: series[name] for name in in_order(series)}


def _lengths(records: Sequence[Record]) -> list[int]:
    return [r["lengths"][0] for r in records]


def _plain_ticks(ax: Axes, ticks: Sequence[int]) -> None:
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
