"""The model's tables and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.model_card import Card
from harness.model_fit import Fit, workers
from harness.model_predict import Held, Prediction

SCHEMA = "verify-numba-model/1"
PLAIN_WIDTH = 130
"""Columns where there is no terminal to ask."""
WARNING = "A PREDICTION from a fit and from assumptions: nothing here was measured on this card."
MEANING = (
    "kernel, memory, mma: us a tile and worker; the longest rules. low: they overlap perfectly; high: the two longest "
    "do not overlap at all. Neither is a bound."
)


def print_fit(fit: Fit, title: str, console: Console) -> None:
    """The fitted numbers, and how far the fit is off on each line."""
    table = _table(title, "L", "measured, us", "fit, us", "error")
    for line in fit.lines:
        table.add_row(f"{line.L:,}", f"{line.us:.1f}", f"{fit.us(line.L):.1f}", f"{fit.error_percent(line):+.1f}%")
    console.print(table)
    console.print(f"{fit_text(fit)}\n", markup=False)


def fit_text(fit: Fit) -> str:
    per_tile = f"{fit.tile_us:.3f} us a tile of 16 keys and worker"
    return f"fitted: {fit.fixed_us:.2f} us fixed, {per_tile}, {workers(fit.sms)} workers"


def print_predictions(card: Card, predictions: Sequence[Prediction], assumed: Sequence[str], console: Console) -> None:
    """One line a prefix length; the assumptions below."""
    columns = ("L", "low, us", "high, us", "byte floor, us", "flop floor, us", *predictions[0].limits, "rules")
    table = _table(f"{card.name}, predicted", *columns)
    for item in predictions:
        floors = (f"{item.floor.bytes_us:.1f}", f"{item.floor.flops_us:.1f}")
        cells = [f"{value:.3f}" for value in item.limits.values()]
        table.add_row(f"{item.L:,}", f"{item.low_us:.1f}", f"{item.high_us:.1f}", *floors, *cells, item.rules)
    console.print(table)
    console.print(WARNING, style="bold")
    console.print(MEANING, highlight=False)
    _print_assumed(assumed, console)


def print_comparison(card: Card, held: Sequence[Held], assumed: Sequence[str], console: Console) -> None:
    """Measured beside predicted, with the ratios."""
    columns = ("L", "measured, us", "predicted low, us", "predicted high, us", "measured / low", "measured / high")
    table = _table(f"{card.name}, measured beside predicted", *columns, "verdict")
    for item in held:
        to_low, to_high = item.ratios
        low, high = item.prediction.low_us, item.prediction.high_us
        numbers = (f"{item.line.us:.1f}", f"{low:.1f}", f"{high:.1f}", f"{to_low:.2f}", f"{to_high:.2f}")
        table.add_row(f"{item.line.L:,}", *numbers, item.verdict)
    console.print(table)
    _print_assumed(assumed, console)


def fit_json(fit: Fit) -> dict[str, Any]:
    lines = [
        {"L": line.L, "us": line.us, "fit_us": fit.us(line.L), "error_percent": fit.error_percent(line)}
        for line in fit.lines
    ]
    return {"sms": fit.sms, "fixed_us": fit.fixed_us, "tile_us": fit.tile_us, "lines": lines}


def card_json(card: Card, assumed: Sequence[str]) -> dict[str, Any]:
    return {
        "card": card.name,
        "sms": card.sms,
        "boost_ghz": card.boost_ghz,
        "bandwidth_gbps": card.bandwidth_gbps,
        "mma_tflops": card.mma_tflops,
        "assumptions": list(assumed),
    }


def prediction_json(item: Prediction) -> dict[str, Any]:
    return {
        "L": item.L,
        "predicted_low_us": item.low_us,
        "predicted_high_us": item.high_us,
        "floor_bytes_us": item.floor.bytes_us,
        "floor_flops_us": item.floor.flops_us,
        "us_a_tile": item.limits,
        "rules": item.rules,
    }


def held_json(item: Held) -> dict[str, Any]:
    to_low, to_high = item.ratios
    ratios = {"measured_over_low": to_low, "measured_over_high": to_high, "verdict": item.verdict}
    return {**prediction_json(item.prediction), "measured_us": item.line.us, **ratios}


def _print_assumed(assumed: Sequence[str], console: Console) -> None:
    console.print("Assumed:", *(f"- {line}" for line in assumed), sep="\n", markup=False, highlight=False)
    console.print()


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    return table
