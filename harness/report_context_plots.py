"""Pictures of `bench-context` results: decode speed by context length beside what the GPU reports of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.report_load import ResultFile
from harness.report_style import INK, Picture, legend, length_axis, log_values, new_figure

SPEED = "Decoded tokens a second by context length, one line a result."
GPU = "GPU utilisation, memory-controller utilisation and power while decoding, by context length."
METERS = (("gpu_percent", "GPU busy, %"), ("memory_percent", "memory controller, %"), ("power_w", "power, W"))


def context_pictures(files: Sequence[ResultFile]) -> Iterator[Picture]:
    """Decode speed of all results together, and the meters where any result has them."""
    if not files:
        return
    yield Picture("decode-speed", SPEED, _speed(files))
    if any(r.get(name) is not None for file in files for r in file.records for name, _ in METERS):
        yield Picture("decode-gpu", GPU, _meters(files))


def _speed(files: Sequence[ResultFile]) -> Figure:
    figure, (ax,) = new_figure("Decode speed by context length", files[0].machine)
    _lines(ax, files, "decode_tokens_per_s")
    log_values(ax, "tokens a second")
    legend(ax)
    return figure


def _meters(files: Sequence[ResultFile]) -> Figure:
    figure, axes = new_figure("What the GPU does while it decodes", files[0].machine, columns=len(METERS))
    for ax, (name, label) in zip(axes, METERS, strict=True):
        _lines(ax, files, name)
        ax.set_ylim(bottom=0)
        if name.endswith("_percent"):
            ax.set_ylim(0, 105)
        ax.set_ylabel(label, color=INK)
    legend(axes[-1])
    return figure


def _lines(ax: Axes, files: Sequence[ResultFile], name: str) -> None:
    contexts: list[int] = []
    for file in files:
        points = sorted((r["context"], r[name]) for r in file.records if r.get(name) is not None)
        if points:
            ax.plot(*zip(*points, strict=True), marker="o", label=file.label)
            contexts += [context for context, _ in points]
    length_axis(ax, contexts)
    ax.set_xlabel("context, tokens", color=INK)
