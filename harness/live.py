"""`verify-numba live`: a real SGLang engine without weights, in off, validate and on, and what differed."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from harness.errors import UsageError
from harness.jsonio import check_target, write_json
from harness.live_model import build_model
from harness.live_report import Comparison, print_comparison
from harness.live_run import LiveRunner, ModeRun, refuse_without_engine
from harness.live_spec import ALGORITHMS, LiveSpec
from sglang_glue.settings import PREFIX, Settings, SettingsError

MODES = ("off", "validate", "on")
EXIT_AGREE, EXIT_DIFFER = 0, 1
DEFAULT_T = {"ngram": 9, "eagle": 16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--algorithm",
        choices=[a for a in ALGORITHMS if a != "none"],
        default="ngram",
        help="what draws the trees",
    )
    add(
        "--modes",
        default="off,validate,on",
        help="runs, in order; a mode may come twice (default: %(default)s)",
    )
    add("--layers", type=int, default=4, help="layers of the model (default: %(default)s)")
    add("--heads", type=int, default=8, help="query heads of the rank (default: %(default)s)")
    add("--hidden", type=int, default=1024, help="hidden size (default: %(default)s)")
    add("--draft-tokens", type=int, metavar="T", help="root included (default: 9 for ngram, 16 for eagle)")
    add("--topk", type=int, default=4, help="EAGLE's branches a step (default: %(default)s)")
    add("--steps", type=int, default=4, help="EAGLE's draft steps (default: %(default)s)")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--batch", type=int, default=8, help="most requests at once (default: %(default)s)")
    add("--churn", type=int, default=32, help="batches of changing size and lengths (default: %(default)s)")
    add("--churn-longest", type=int, default=2048, help="longest prompt among them (default: %(default)s)")
    add("--new-tokens", type=int, default=64, help="tokens generated a request (default: %(default)s)")
    add("--lengths", default="1024,4096", help="prefixes whose verify steps are timed; 'none' for no timing")
    add(
        "--memory",
        type=float,
        default=0.35,
        help="fraction of GPU memory for the engine (default: %(default)s)",
    )
    add("--seed", type=int, default=0)
    add(
        "--tie",
        type=float,
        default=0.1,
        help="log-probability gap up to which two tokens tie (default: %(default)s)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further KDTREE_ setting, repeatable",
    )
    add("--keep", type=Path, metavar="FOLDER", help="keep logs, results and counter files here")
    add("--json", metavar="FILE", help="write the comparison as JSON ('-' for stdout)")


def run(args: argparse.Namespace) -> int:
    spec, modes, settings = spec_of(args), _modes(args.modes), _settings(args.set)
    if args.json:
        check_target(args.json)
    refuse_without_engine()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        return _compare(args, spec, modes, settings, args.keep.resolve())
    with tempfile.TemporaryDirectory(prefix="verify-numba-live-") as folder:
        return _compare(args, spec, modes, settings, Path(folder))


def _compare(
    args: argparse.Namespace, spec: LiveSpec, modes: list[str], settings: dict[str, str], folder: Path
) -> int:
    runner = LiveRunner(spec, build_model(folder / "model", spec), folder, settings)
    runs: list[ModeRun] = []
    for mode in modes:
        before = modes[: len(runs)].count(mode)
        label = mode if not before else f"{mode}-{before + 1}"
        print(f"{label}: starting the engine", file=sys.stderr, flush=True)
        runs.append(runner.run(label, mode))
    comparison = Comparison.of(spec, runs, runner, args.tie)
    if args.json:
        write_json(comparison.as_json(), args.json)
    if args.json != "-":
        print_comparison(comparison)
    return EXIT_AGREE if comparison.agrees else EXIT_DIFFER


def spec_of(args: argparse.Namespace) -> LiveSpec:
    """The spec of a command line. Raises UsageError."""
    positive = ("layers", "heads", "hidden", "topk", "steps", "batch", "new_tokens")
    for name in positive:
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')}: found {getattr(args, name)}, expected at least 1")
    if not 0 < args.memory < 1:
        raise UsageError(f"--memory: found {args.memory}, expected a fraction between 0 and 1")
    if args.churn_longest < 8:
        raise UsageError(f"--churn-longest: found {args.churn_longest}, expected at least 8")
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
        churn=max(args.churn, 0),
        churn_longest=args.churn_longest,
        new_tokens=args.new_tokens,
        lengths=_lengths(args.lengths),
        seed=args.seed,
        memory=args.memory,
    )


def _lengths(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--lengths: found {text!r}, expected numbers, as in 1024,4096, or none")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"--modes: found {mode!r}, expected {', '.join(MODES)}")
    return modes


def _settings(pairs: list[str]) -> dict[str, str]:
    settings = dict(pair.partition("=")[::2] for pair in pairs)
    for name in settings:
        if not name.startswith(PREFIX) or name in ("KDTREE_VERIFY", "KDTREE_STATUS"):
            raise UsageError(
                f"--set: found {name!r}, expected a KDTREE_ setting other than VERIFY and STATUS"
            )
    try:
        Settings.from_env({"KDTREE_VERIFY": "validate", **settings})
    except SettingsError as error:
        raise UsageError(f"--set: {error}") from error
    return settings
