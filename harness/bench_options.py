"""The options of `bench`, turned into shapes, variants and settings."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from harness.bench_shapes import (
    MAX_BS,
    PRESETS,
    BenchShape,
    check_shape,
    int_list,
    run_length_of,
    sweep,
    with_slots,
)
from harness.errors import UsageError

DEFAULTS = {"H": "8", "T": "9", "bs": "1", "L": "65536"}
MODES = ("graph", "eager")
FORMS = ("auto", "cluster", "single")


@dataclass(frozen=True)
class Settings:
    """Everything `bench` was asked to run, checked."""

    shapes: Sequence[BenchShape]
    modes: Sequence[str]
    splits: Sequence[int | None]
    forms: Sequence[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = parser.add_argument_group("shapes (lists are separated by commas; 4k is 4096)")
    shapes.add_argument("--preset", choices=sorted(PRESETS), help="a named list of shapes")
    shapes.add_argument("--H", metavar="LIST", help="query heads, 1 to 128 (default 8)")
    shapes.add_argument("--T", metavar="LIST", help="draft tokens a request, 1 to 64 (default 9)")
    shapes.add_argument("--bs", metavar="LIST", help="requests in the batch (default 1)")
    shapes.add_argument("--L", metavar="LIST", help="prefix tokens a request (default 64k)")
    shapes.add_argument(
        "--lengths",
        metavar="LIST",
        action="append",
        default=[],
        help="one ragged batch: the prefix of each request; may be given several times",
    )
    shapes.add_argument(
        "--slots",
        metavar="LIST",
        help="scattered, contiguous, or a run length such as 16 (default scattered)",
    )
    how = parser.add_argument_group("how it is run")
    how.add_argument(
        "--mode",
        metavar="LIST",
        default="graph",
        help="graph, eager or both (default graph)",
    )
    how.add_argument(
        "--nsplit",
        metavar="LIST",
        default="auto",
        help="split counts; auto is the plan's own",
    )
    how.add_argument(
        "--form",
        metavar="LIST",
        default="auto",
        help="auto, cluster, single (default auto)",
    )
    how.add_argument(
        "--peers",
        metavar="LIST",
        help="all, none, names, or package.module:name of your own (default all; none with --preset quick or slots)",
    )
    how.add_argument(
        "--list-peers",
        action="store_true",
        help="say which peers can run here, and stop",
    )
    how.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="auto, cuda:N, or cpu (host clock)",
    )
    how.add_argument(
        "--pool-slots",
        metavar="N",
        help="slots in the pool (default 1200000, more if needed)",
    )
    how.add_argument("--seed", type=int, default=0, help="of latents, slots and trees (default 0)")
    how.add_argument(
        "--pass-seconds",
        type=float,
        default=0.2,
        metavar="S",
        help="a pass of one contender, at most (default 0.2)",
    )
    how.add_argument(
        "--step-limit",
        type=float,
        default=60.0,
        metavar="S",
        help="a contender that checks or times a shape for longer is ended (default 60)",
    )
    how.add_argument(
        "--start-limit",
        type=float,
        default=150.0,
        metavar="S",
        help="the same for importing and compiling (default 150)",
    )
    how.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="stop before a shape that would not fit",
    )
    result = parser.add_argument_group("result")
    result.add_argument("--json", metavar="FILE", help="rewritten after each contender and shape")
    result.add_argument(
        "--commit",
        metavar="ID",
        help="commit to record where there is no git checkout (default $VERIFY_NUMBA_COMMIT)",
    )
    result.add_argument("--log-dir", metavar="DIR", help="keep what each contender's process prints")


def read_settings(args: argparse.Namespace) -> Settings:
    """Raise UsageError for anything that cannot be run."""
    shapes = _shapes(args)
    for shape in shapes:
        check_shape(shape)
    return Settings(
        shapes=shapes,
        modes=_choices(args.mode, "--mode", MODES),
        splits=[None if item == "auto" else _split(item) for item in args.nsplit.split(",")],
        forms=_choices(args.form, "--form", FORMS),
    )


def _shapes(args: argparse.Namespace) -> list[BenchShape]:
    swept = [name for name in DEFAULTS if getattr(args, name) is not None]
    if args.preset:
        if swept or args.lengths:
            raise UsageError(
                f"--preset stands alone; found {' '.join(f'--{name}' for name in swept) or '--lengths'} too"
            )
        shapes = list(PRESETS[args.preset])
    else:
        shapes = _free_shapes(args, swept)
    if args.slots is None:
        return shapes
    return with_slots(shapes, [run_length_of(item) for item in args.slots.split(",")])


def _free_shapes(args: argparse.Namespace, swept: Sequence[str]) -> list[BenchShape]:
    values = {
        name: int_list(getattr(args, name) or default, f"--{name}") for name, default in DEFAULTS.items()
    }
    mixes = [tuple(int_list(text, "--lengths")) for text in args.lengths]
    for mix in mixes:
        if len(mix) > MAX_BS:
            raise UsageError(f"--lengths: {len(mix)} requests, at most {MAX_BS}")
    ragged = [BenchShape(mix, t, h) for h, t, mix in itertools.product(values["H"], values["T"], mixes)]
    if mixes and not {"bs", "L"} & set(swept):
        return ragged
    return sweep(values["H"], values["T"], values["bs"], values["L"]) + ragged


def _choices(text: str, option: str, allowed: Sequence[str]) -> list[str]:
    items = text.split(",")
    for item in items:
        if item not in allowed:
            raise UsageError(f"{option}: {item!r} is none of {', '.join(allowed)}")
    return items


def _split(text: str) -> int:
    (value,) = int_list(text, "--nsplit")
    if value < 1:
        raise UsageError(f"--nsplit: {value} is below 1")
    return value
