"""Pictures by prefix length: time, bandwidth, speed-up, error, and time beside bandwidth, the one for the README."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.report_load import Record, ResultFile
from harness.report_style import (
    FLOOR,
    INK,
    OURS,
    US,
    Picture,
    in_order,
    legend,
    length_axis,
    log_values,
    look,
    new_figure,
)

UNIT_ROUNDOFF = 2.0**-9
"""Half a bf16 ulp, relative: the most that rounding one number to bf16 changes it."""

_MAIN = (
    "Time of one verify step of one layer by prefix length, and the latent bandwidth that it comes to. "
    "A peer with a chain mask cannot do the tree: its draft token i sees tokens 0 to i."
)
_TIME = "Time of one verify step of one layer by prefix length, with the time its bytes and operations take at least."
_BANDWIDTH = "Latent bytes a second by prefix length, counting every row once; the line is the measured read bandwidth."
_SPEEDUP = "How many times longer each peer takes, timed in the same run and the same mode."
_ERROR = "Error against float64 by prefix length, with the limit each run was held to and half a bf16 ulp."


def length_pictures(file: ResultFile) -> Iterator[Picture]:
    """For each sweep of lengths in a result; the largest comes first, and its first picture is the README's."""
    families = _families(file.records)
    sweeps = {key: rows for key, rows in families.items() if len({r["lengths"][0] for r in rows}) > 1}
    for position, ((H, T, bs, mode), records) in enumerate(sweeps.items()):
        shape = f"H {H}, T {T}, bs {bs}, {mode}, scattered slots, cold latents; {file.machine}"
        tag = f"h{H}-t{T}-bs{bs}-{mode}"
        if position == 0:
            yield Picture("main", _MAIN, _main(records, shape, file))
        yield Picture(f"time-{tag}", _TIME, _time(records, shape))
        yield Picture(f"bandwidth-{tag}", _BANDWIDTH, _bandwidth(records, shape, file))
        if any(r["peers"] for r in records):
            yield Picture(f"speedup-{tag}", _SPEEDUP, _speedup(records, shape))
        yield Picture(f"error-{tag}", _ERROR, _error(records, shape))


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


def _main(records: Sequence[Record], subtitle: str, file: ResultFile) -> Figure:
    figure, (left, right) = new_figure("Verify attention by prefix length", subtitle, columns=2)
    _draw_time(left, records)
    _draw_bandwidth(right, records, file)
    entries = {label: line for ax in (left, right) for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    legend(right, list(entries.values()), list(entries))
    return figure


def _time(records: Sequence[Record], subtitle: str) -> Figure:
    figure, (ax,) = new_figure("Verify attention: time by prefix length", subtitle)
    _draw_time(ax, records)
    legend(ax)
    return figure


def _bandwidth(records: Sequence[Record], subtitle: str, file: ResultFile) -> Figure:
    figure, (ax,) = new_figure("Latent bandwidth by prefix length", subtitle)
    _draw_bandwidth(ax, records, file)
    legend(ax)
    return figure


def _draw_time(ax: Axes, records: Sequence[Record]) -> None:
    for name, points in _series(records, "us").items():
        ax.plot(*zip(*points, strict=True), label=_label(name, records), **look(name))
    filled = [r for r in records if r["lengths"][0]]
    for name, dash in (("bytes", "--"), ("flops", ":")):
        floors = [r[f"floor_{name}_us"] for r in filled]
        ax.plot(_lengths(filled), floors, dash, color=FLOOR, label=f"floor: {name}")
    log_values(ax, US)
    length_axis(ax, _lengths(records))


def _draw_bandwidth(ax: Axes, records: Sequence[Record], file: ResultFile) -> None:
    records = [r for r in records if r["lengths"][0]]
    for name, points in _series(records, "gbps").items():
        ax.plot(*zip(*points, strict=True), label=_label(name, records), **look(name))
    ceiling = (file.result.get("ceilings") or {}).get("read_bytes_per_s")
    if ceiling:
        ax.axhline(ceiling / 1e9, color=FLOOR, linestyle="-.", label=f"measured read: {ceiling / 1e9:,.0f} GB/s")
    log_values(ax, "GB/s")
    length_axis(ax, _lengths(records))


def _speedup(records: Sequence[Record], subtitle: str) -> Figure:
    figure, (ax,) = new_figure("Peers' time over ours", subtitle)
    for name, points in _series(records, "ratio").items():
        if name != OURS:
            ax.plot(*zip(*points, strict=True), label=_label(name, records), **look(name))
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


def _series(records: Sequence[Record], value: str) -> dict[str, list[tuple[int, float]]]:
    """Ours and each timed peer: (prefix length, `us`, `gbps` or `ratio`)."""
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for r in records:
        times = {OURS: r["us"]} | {n: p["us"] for n, p in r["peers"].items() if p.get("us") is not None}
        for name, us in times.items():
            values = {"us": us, "gbps": r["bytes"] / us / 1e3, "ratio": us / r["us"]}
            series[name].append((r["lengths"][0], values[value]))
    return {name: series[name] for name in in_order(series)}


def _label(name: str, records: Sequence[Record]) -> str:
    """The name, with the mask of a peer that cannot do the tree."""
    masks = {r["peers"][name].get("mask") for r in records if name in r["peers"]} - {None, "", "tree"}
    return f"{name} ({', '.join(sorted(masks))} mask)" if masks else name


def _lengths(records: Sequence[Record]) -> list[int]:
    return [r["lengths"][0] for r in records]
