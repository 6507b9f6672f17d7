"""`model`: predicted time of a verify step on GPUs of compute capability 12.0, and the check for who has one."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.bench_shapes import BenchShape, check_shape, int_list
from harness.errors import UsageError
from harness.jsonio import STDOUT, check_target, write_json
from harness.model_card import CARDS, Card, by_key, by_machine, with_inputs
from harness.model_fit import Fit, H, T, fit, fit_source, lines_of, load_bench, machine_of
from harness.model_predict import Held, assumptions, predict
from harness.model_report import (
    PLAIN_WIDTH,
    SCHEMA,
    card_json,
    fit_json,
    held_json,
    prediction_json,
    print_comparison,
    print_fit,
    print_predictions,
)

STORED = Path("docs", "results", "h200-targets.json")
ROOT = Path(__file__).parents[1]
LENGTHS = "4k,8k,16k,32k,64k,128k,200000"
CLOCK_GHZ = 1.98
INPUTS = ("boost", "bandwidth", "mma")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `model`."""
    parser.add_argument("--compare", metavar="RESULT.json", help="a bench result from the card, beside its prediction")
    parser.add_argument("--from", dest="source", metavar="FILE", help=f"bench result to fit (a checkout's {STORED})")
    parser.add_argument("--clock", type=float, default=CLOCK_GHZ, metavar="GHZ",
                        help=f"SM clock under load when --from was measured (default {CLOCK_GHZ})")  # fmt: skip
    parser.add_argument("--card", choices=[card.key for card in CARDS], help="only this card")
    parser.add_argument("--boost", type=float, metavar="GHZ", help="the card's SM clock under load (needs one card)")
    parser.add_argument("--bandwidth", type=float, metavar="GBPS", help="the card's memory, GB/s (needs one card)")
    parser.add_argument("--mma", type=float, metavar="TFLOPS",
                        help="the card's mma.sync rate, bf16 with float32 sums (needs one card)")  # fmt: skip
    parser.add_argument("--L", metavar="LIST", help=f"prefix lengths to predict (default {LENGTHS})")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON ('-' for standard output)")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; raises UsageError for unusable input."""
    _check(args)
    source = args.source or STORED.as_posix()
    file = load_bench(args.source or _stored())
    measured = fit_source(file, source)
    console = _console(to_stderr=args.json == STDOUT)
    print_fit(measured, f"{file.machine}, measured ({source})", console)
    outcome = _compare(args, measured, console) if args.compare else _predict(args, measured, console)
    if args.json:
        origin = {"from": source, "gpu": file.machine, "clock_ghz": args.clock, "fit": fit_json(measured)}
        shape = {"H": H, "T": T, "bs": 1}
        write_json({"schema": SCHEMA, "shape": shape, "measured": origin, **outcome}, args.json)
    return 0


def _predict(args: argparse.Namespace, measured: Fit, console: Console) -> dict[str, Any]:
    cards = [by_key(args.card)] if args.card else CARDS
    lengths = _lengths(args.L or LENGTHS)
    outcomes = []
    for card in (_with_inputs(card, args) for card in cards):
        predictions = [predict(measured, args.clock, card, L) for L in lengths]
        assumed = assumptions(measured, args.clock, card)
        print_predictions(card, predictions, assumed, console)
        outcomes.append({**card_json(card, assumed), "predictions": [prediction_json(item) for item in predictions]})
    return {"cards": outcomes}


def _compare(args: argparse.Namespace, measured: Fit, console: Console) -> dict[str, Any]:
    file = load_bench(args.compare)
    machine = machine_of(file)
    card = _with_inputs(by_key(args.card) if args.card else by_machine(args.compare, machine), args)
    if card.sms != machine["sms"]:
        raise UsageError(f"{args.compare}: measured on {machine['sms']} SMs, --card {card.key} has {card.sms}")
    lines = lines_of(file)
    theirs = fit(lines, card.sms, args.compare)
    held = [Held(line, predict(measured, args.clock, card, line.L)) for line in lines]
    assumed = assumptions(measured, args.clock, card)
    print_comparison(card, held, assumed, console)
    print_fit(theirs, f"{file.machine}, measured ({args.compare})", console)
    comparison = [held_json(item) for item in held]
    return {**card_json(card, assumed), "compared": args.compare, "comparison": comparison, "fit": fit_json(theirs)}


def _check(args: argparse.Namespace) -> None:
    for name in ("clock", *INPUTS):
        value = getattr(args, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name} is {value:g}, expected a number above 0")
    given = [f"--{name}" for name in INPUTS if getattr(args, name) is not None]
    if given and not (args.card or args.compare):
        raise UsageError(f"{', '.join(given)} speaks of one card: name it with --card")
    if args.compare and args.L:
        raise UsageError("--compare takes the lengths from its file, found --L too")
    if args.json:
        check_target(args.json)


def _stored() -> str:
    path = ROOT / STORED
    if not path.is_file():
        raise UsageError(f"--from is missing: {STORED} comes with a checkout, not with an installed package")
    return str(path)


def _lengths(text: str) -> list[int]:
    lengths = int_list(text, "--L")
    for L in lengths:
        check_shape(BenchShape((L,), T=T, H=H))
    return lengths


def _with_inputs(card: Card, args: argparse.Namespace) -> Card:
    return with_inputs(card, args.boost, args.bandwidth, args.mma)


def _console(to_stderr: bool) -> Console:
    console = Console(stderr=to_stderr)
    return console if console.is_terminal else Console(stderr=to_stderr, width=PLAIN_WIDTH)
