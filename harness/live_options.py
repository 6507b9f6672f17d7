"""The options of `verify-numba live`, and what they are checked for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.live_spec import ALGORITHMS, LiveSpec
from sglang_glue.settings import PREFIX, Settings, SettingsError

MODES = ("off", "validate", "on")
DEFAULT_T = {"ngram": 9, "eagle": 16}
OURS = ("model_path", "load_format", "skip_tokenizer_init", "tp_size")
"""Engine arguments that make a run what it is; not for --engine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_work(parser)
    _add_runs(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    algorithms = [a for a in ALGORITHMS if a != "none"]
    add("--algorithm", choices=algorithms, default="ngram", help="what draws the trees")
    add("--layers", type=int, default=4, help="layers of the model (default: %(default)s)")
    add("--heads", type=int, default=8, help="query heads of one rank (default: %(default)s)")
    add("--hidden", type=int, default=1024, help="hidden size (default: %(default)s)")
    add("--draft-tokens", type=int, metavar="T", help="root included (default: 9 for ngram, 16 for eagle)")
    add("--topk", type=int, default=4, help="EAGLE's branches a step (default: %(default)s)")
    add("--steps", type=int, default=4, help="EAGLE's draft steps (default: %(default)s)")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks, a GPU each (default: %(default)s)")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--memory", type=float, default=0.35, help="fraction of GPU memory for the engine (default: %(default)s)")
    add("--seed", type=int, default=0)
    engine = "a further argument of sglang.Engine, over ours; the value is JSON or text; repeatable"
    add("--engine", action="append", default=[], metavar="NAME=VALUE", help=engine)


def _add_work(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch", type=int, default=8, help="most requests at once (default: %(default)s)")
    add("--churn", type=int, default=32, help="batches of changing size and lengths (default: %(default)s)")
    add("--churn-longest", type=int, default=2048, help="longest prompt among them (default: %(default)s)")
    add("--new-tokens", type=int, default=64, help="tokens generated a request (default: %(default)s)")
    again = "generate one batch so many times, from an empty cache each time: the tokens must be the same"
    add("--repeat", type=int, default=0, metavar="N", help=again)
    add("--lengths", default="1024,4096", help="prefixes whose verify steps are timed; 'none' for no timing")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--modes", default="off,validate,on", help="runs, in order; a mode may come twice (default: %(default)s)")
    gpus = "GPUs to spread the runs over, --tp of them each, as in 0,1,2 (default: one run after another)"
    add("--gpus", metavar="LIST", help=gpus)
    gap = "log-probability gap up to which two tokens tie (default: %(default)s)"
    add("--tie", type=float, default=0.1, help=gap)
    add("--timeout", type=float, default=1800, metavar="S", help="seconds one run may take (default: %(default)s)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a further KDTREE_ setting, repeatable")
    add("--keep", type=Path, metavar="FOLDER", help="keep logs, results and counter files here")
    add("--json", metavar="FILE", help="write the comparison as JSON ('-' for stdout)")


def spec_of(args: argparse.Namespace) -> LiveSpec:
    """The spec of a command line. Raises UsageError."""
    _check_numbers(args)
    T = args.draft_tokens or DEFAULT_T[args.algorithm]
    if not 1 <= T <= 64:
        raise UsageError(f"--draft-tokens: found {T}, expected 1 to 64")
    return LiveSpec(
        algorithm=args.algorithm,
        layers=args.layers,
        heads=args.heads,
        hidden=args.hidden,
        T=T,
        topk=args.topk,
        steps=args.steps,
        graphs=not args.eager,
        batch=args.batch,
        churn=args.churn,
        churn_longest=args.churn_longest,
        new_tokens=args.new_tokens,
        lengths=lengths_of(args.lengths),
        seed=args.seed,
        memory=args.memory,
        tp=args.tp,
        repeat=args.repeat,
        engine=_engine(args.engine),
    )


def _check_numbers(args: argparse.Namespace) -> None:
    least = dict.fromkeys(("layers", "heads", "hidden", "topk", "steps", "batch", "new_tokens", "tp"), 1)
    for name, floor in {**least, "churn": 0, "repeat": 0, "churn_longest": 8}.items():
        if getattr(args, name) < floor:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option}: found {getattr(args, name)}, expected at least {floor}")
    if not 0 < args.memory < 1:
        raise UsageError(f"--memory: found {args.memory}, expected a fraction between 0 and 1")
    if args.timeout <= 0:
        raise UsageError(f"--timeout: found {args.timeout}, expected seconds above 0")


def lengths_of(text: str) -> tuple[int, ...]:
    """Prefix lengths of `--lengths`, each once; () for "none". Raises UsageError."""
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--lengths: found {text!r}, expected numbers, as in 1024,4096, or none")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _engine(pairs: list[str]) -> tuple[tuple[str, Any], ...]:
    found = []
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier() or name in OURS:
            raise UsageError(f"--engine: found {pair!r}, expected NAME=VALUE with none of {', '.join(OURS)}")
        try:
            found.append((name, json.loads(text)))
        except ValueError:
            found.append((name, text))
    return tuple(found)


def modes_of(text: str) -> list[str]:
    """The modes of --modes. Raises UsageError."""
    modes = text.split(",")
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"--modes: found {mode!r}, expected {', '.join(MODES)}")
    return modes


def gpu_groups(args: argparse.Namespace) -> list[str | None]:
    """A value of CUDA_VISIBLE_DEVICES for each run that may go on at once. Raises UsageError."""
    if args.gpus is None:
        return [None]
    gpus = args.gpus.split(",")
    if not all(gpu.strip() for gpu in gpus) or len(set(gpus)) < len(gpus):
        raise UsageError(f"--gpus: found {args.gpus!r}, expected different GPUs, as in 0,1,2")
    if len(gpus) < args.tp:
        raise UsageError(f"--gpus: found {len(gpus)} GPUs, expected at least --tp {args.tp}")
    return [",".join(gpus[i : i + args.tp]) for i in range(0, len(gpus) - args.tp + 1, args.tp)]


def settings_of(pairs: list[str]) -> dict[str, str]:
    """The settings of --set. Raises UsageError."""
    settings = dict(pair.partition("=")[::2] for pair in pairs)
    for name in settings:
        if not name.startswith(PREFIX) or name in ("KDTREE_VERIFY", "KDTREE_STATUS"):
            raise UsageError(f"--set: found {name!r}, expected a KDTREE_ setting other than VERIFY and STATUS")
    try:
        Settings.from_env({"KDTREE_VERIFY": "validate", **settings})
    except SettingsError as error:
        raise UsageError(f"--set: {error}") from error
    return settings
