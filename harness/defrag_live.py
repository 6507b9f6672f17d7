"""`defrag --live`: a real SGLang engine under churn with each tier, and what the tiers changed.

All tiers serve the same requests from a pool that they go through several times. Exit code 1 when an answer differs
where its tokens do not tie, when something that should have been at work was not, or when ``relocate`` moved nothing:
such a run would prove nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from harness import jsonio
from harness.defrag_live_report import faults_of, print_runs
from harness.defrag_live_run import TierRun, TierRunner
from harness.errors import UsageError
from harness.live_model import build_model
from harness.live_options import lengths_of
from harness.live_process import processes_end_with_this
from harness.live_run import refuse_without_engine
from harness.live_spec import ALGORITHMS, LiveSpec
from sglang_glue.defrag.settings import DefragSettings, DefragSettingsError

DEFAULTS = {
    "slots": 24_576,
    "context": 2304,
    "running": 8,
    "interval": 16,
    "low": 32.0,
    "high": 256.0,
    "budget": 4,
}
"""A pool that is gone through several times in seconds, and relocation that begins early and moves little at once."""
DRAFT_TOKENS = {"ngram": 9, "eagle": 16, "none": 1}
CHUNK = 512
"""Tokens of a prefill step, so that long prompts come in several and a relocation may meet one between two of them."""
MOST_NEW_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only ``--live`` has."""
    group = parser.add_argument_group("a live engine (--live)")
    group.add_argument(
        "--live", action="store_true", help="serve with a real SGLang engine on this machine's GPU instead"
    )
    group.add_argument("--requests", type=int, default=240, help="requests to serve (default 240)")
    group.add_argument("--tiers", default="off,sort,relocate", help="tiers to run, in order (default %(default)s)")
    group.add_argument("--verify", choices=("off", "on"), default="on", help="KDTREE_VERIFY of all tiers (default on)")
    group.add_argument("--algorithm", choices=ALGORITHMS, default="ngram", help="speculation (default ngram)")
    group.add_argument("--layers", type=int, default=4, help="layers of the model (default 4)")
    group.add_argument("--lengths", default="8192", help="prefixes whose steps are timed after the churn; 'none'")
    group.add_argument(
        "--tie", type=float, default=0.1, help="log-probability gap up to which tokens tie (default 0.1)"
    )
    group.add_argument("--timeout", type=float, default=240.0, help="seconds an engine may take in all (default 240)")
    group.add_argument("--memory", type=float, default=0.35, help="fraction of GPU memory for an engine (default 0.35)")
    group.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and raw results here")


def run(args: argparse.Namespace) -> int:
    """Run the tiers and compare; returns the exit code."""
    tiers, spec = _tiers(args.tiers), spec_of(args)
    _check_settings(args)
    refuse_without_engine()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        return _compare(args, tiers, spec, args.keep.resolve())
    with tempfile.TemporaryDirectory(prefix="verify-numba-defrag-") as folder:
        return _compare(args, tiers, spec, Path(folder))


def _compare(args: argparse.Namespace, tiers: list[str], spec: LiveSpec, folder: Path) -> int:
    console = Console(stderr=args.json == jsonio.STDOUT)
    runner = TierRunner(spec, build_model(folder / "model", spec), folder, settings_of(args), args.timeout)
    runs: list[TierRun] = []
    for tier in tiers:
        print(f"{tier}: starting the engine", file=sys.stderr, flush=True)
        base = next((r.tier for r in runs if r.failure is None), None)
        with processes_end_with_this():
            runs.append(runner.run(tier, base))
    faults = [fault for one in runs for fault in faults_of(one, args.verify == "on", args.tie)]
    print_runs(runs, faults, args.tie, console)
    if args.json:
        from harness.bench_machine import describe_here  # needs torch, which the simulator does without

        document = {
            "format": "defrag-live-1",
            "spec": asdict(spec),
            "settings": settings_of(args),
            "faults": faults,
            "tiers": [asdict(one) for one in runs],
            **describe_here(),
        }
        jsonio.write_json(document, args.json)
    return 1 if faults else 0


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """The KDTREE_ variables of all tiers."""
    return {
        "KDTREE_VERIFY": args.verify,
        "KDTREE_DEFRAG_BUDGET": f"{args.budget}M",
        "KDTREE_DEFRAG_INTERVAL": str(args.interval),
        "KDTREE_DEFRAG_LOW": f"{args.low:g}",
        "KDTREE_DEFRAG_HIGH": f"{args.high:g}",
        "KDTREE_DEFRAG_BLOCK": str(args.block),
    }


def _check_settings(args: argparse.Namespace) -> None:
    try:
        DefragSettings.from_env(settings_of(args))
    except DefragSettingsError as error:
        raise UsageError(str(error)) from error


def spec_of(args: argparse.Namespace) -> LiveSpec:
    """What the engine and the requests are. Raises UsageError."""
    for name in ("requests", "layers", "timeout", "running"):
        if getattr(args, name) <= 0:
            raise UsageError(f"--{name}: found {getattr(args, name)}, expected more than 0")
    if not 0 < args.memory < 1:
        raise UsageError(f"--memory: found {args.memory}, expected a fraction between 0 and 1")
    lengths = lengths_of(args.lengths)
    spec = LiveSpec(
        algorithm=args.algorithm,
        layers=args.layers,
        heads=8,
        hidden=1024,
        T=args.draft or DRAFT_TOKENS[args.algorithm],
        topk=4,
        steps=4,
        graphs=True,
        batch=args.running,
        churn=args.requests,
        churn_longest=args.context,
        new_tokens=min(MOST_NEW_TOKENS, args.context // 4),
        lengths=lengths,
        seed=args.seed,
        memory=args.memory,
        engine=(("max_total_tokens", args.slots), ("chunked_prefill_size", CHUNK)),
    )
    if args.slots < spec.context_length:
        raise UsageError(f"--slots {args.slots}: expected at least {spec.context_length}, one request of each length")
    return spec


def _tiers(text: str) -> list[str]:
    from harness.defrag_backend import TIERS

    tiers = text.split(",")
    for tier in tiers:
        if tier not in TIERS or tiers.count(tier) > 1:
            raise UsageError(f"--tiers: found {text!r}, expected some of {', '.join(TIERS)}, each once")
    return tiers
