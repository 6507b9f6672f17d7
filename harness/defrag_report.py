"""How a simulated run is told: a table of the tiers, JSON, and a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from harness.defrag_sim import Sample, Totals
from harness.errors import UsageError
from sglang_glue.defrag.runs import BUCKETS


@dataclass(frozen=True)
class TierResult:
    """One tier's run. ``broken`` says which invariant broke, or is None; ``bytes_moved`` are of all layers."""

    tier: str
    backend: str
    seconds: float
    allocator_calls: int
    totals: Totals
    samples: tuple[Sample, ...]
    slot_bytes: int
    broken: str | None = None

    @property
    def bytes_moved(self) -> int:
        return self.totals.rows_moved * self.slot_bytes

    def late(self) -> Sequence[Sample]:
        """Samples of the second half, when the pool has filled up."""
        live = [s for s in self.samples if s.live.tokens]
        return live[len(live) // 2 :]

    def mean(self, which: str, what: str) -> float:
        """A statistic of the live rows or of the free set, averaged over the second half; 0.0 without samples."""
        values = [float(getattr(getattr(s, which), what)) for s in self.late()]
        return float(np.mean(values)) if values else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "tier": self.tier,
            "backend": self.backend,
            "seconds": self.seconds,
            "allocator_calls": self.allocator_calls,
            "broken": self.broken,
            "bytes_moved": self.bytes_moved,
            "longest_pause_bytes": self.totals.longest_pause_rows * self.slot_bytes,
            "mean_run_second_half": self.mean("live", "mean"),
            "typical_run_second_half": self.mean("live", "typical"),
            "totals": asdict(self.totals),
            "buckets": list(BUCKETS),
            "samples": [
                {"step": s.step, "live": s.live.as_dict(), "free": s.free.as_dict()} for s in self.samples
            ],
        }


def print_table(results: Sequence[TierResult], console: Console) -> None:
    """One line a tier. Run lengths are means over the second half of the run."""
    table = Table(title="KV slots under churn (run lengths in tokens, second half of the run)")
    for name in (
        "tier",
        "mean run",
        "typical run",
        "free run",
        "relocations",
        "moved",
        "longest pause",
        "planning",
        "retracted",
    ):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for r in results:
        pause = _bytes(r.totals.longest_pause_rows * r.slot_bytes)
        plan_ms = 1e3 * r.totals.planning_seconds / max(r.totals.relocations, 1)
        table.add_row(
            r.tier,
            f"{r.mean('live', 'mean'):.1f}",
            f"{r.mean('live', 'typical'):.1f}",
            f"{r.mean('free', 'mean'):.1f}",
            str(r.totals.relocations),
            _bytes(r.bytes_moved),
            pause if r.totals.relocations else "-",
            f"{plan_ms:.1f} ms" if r.totals.relocations else "-",
            str(r.totals.retracted),
        )
    console.print(table)
    for r in results:
        t = r.totals
        state = f"BROKEN: {r.broken}" if r.broken else "invariants hold"
        console.print(
            f"{r.tier} ({r.backend}): {r.allocator_calls} allocator calls in {t.steps} steps, {t.finished} finished, "
            f"{t.aborted} aborted, {r.seconds:.1f} s; {state}",
            highlight=False,
        )


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def check_picture(target: str) -> None:
    """Refuse a picture that cannot be drawn, before the work. Raises UsageError."""
    if Path(target).suffix != ".png":
        raise UsageError(f"--plot {target}: expected a name that ends in .png")
    if not Path(target).absolute().parent.is_dir():
        raise UsageError(f"--plot {target}: the folder {Path(target).parent} does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot: needs the package matplotlib, which is not installed")


def plot(results: Sequence[TierResult], target: str) -> None:
    """Run length over time, and in the second half its distribution over tokens; one colour a tier."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    over_time, spread = figure.subplots(1, 2)
    for r in results:
        live = [s for s in r.samples if s.live.tokens]
        over_time.plot([s.step for s in live], [s.live.mean for s in live], label=f"{r.tier}: mean")
        tokens = np.sum([np.array(s.live.histogram) for s in r.late()], axis=0) * np.array(BUCKETS)
        if np.any(tokens):
            spread.plot(BUCKETS, np.cumsum(tokens) / np.sum(tokens), drawstyle="steps-post", label=r.tier)
    over_time.set(xlabel="scheduler step", ylabel="mean run length (tokens)", yscale="log")
    spread.set(xlabel="run length (tokens, lower bound of its bucket)", xscale="log", ylim=(0, 1))
    spread.set_ylabel("share of tokens in runs no longer (second half)")
    over_time.legend()
    spread.legend()
    figure.savefig(target, dpi=120)
