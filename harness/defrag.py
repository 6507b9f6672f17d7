"""`defrag`: simulate a server's churn and compare what the tiers of KV defragmentation make of it.

Exit code 1 when an invariant breaks: a slot with no owner or several, a token whose row changed, or counters that
do not add up to the pool. `--mover` times the copy of a relocation and `--live` runs a real engine instead, both on
this machine's GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress

from harness import defrag_live, jsonio
from harness.defrag_backend import TIERS, Backend, ModelBackend, ServerShape
from harness.defrag_content import ContentError
from harness.defrag_report import TierResult, check_picture, plot, print_table
from harness.defrag_sim import Server
from harness.defrag_trace import Arrival, drawn, read_trace
from harness.errors import UsageError
from sglang_glue.defrag.controller import Controller
from sglang_glue.defrag.planner import PlannerSettings
from sglang_glue.defrag.reserve import DEFAULT_BLOCK
from sglang_glue.defrag.snapshot import OwnershipError

MIB = 1 << 20
DEFAULTS = {
    "slots": 32_768,
    "context": 4096,
    "running": 16,
    "draft": 9,
    "interval": 16,
    "low": 8.0,
    "high": 32.0,
    "budget": 64,
}
SAMPLES = 400
"""Points in time at which run lengths are taken."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""

    def add(name: str, kind: type, text: str) -> None:
        default = f"default {DEFAULTS[name]:g}"
        if name in defrag_live.DEFAULTS:
            default += f"; with --live {defrag_live.DEFAULTS[name]:g}"
        parser.add_argument(f"--{name}", type=kind, help=f"{text} ({default})")

    parser.add_argument("--steps", type=int, default=8_000, help="scheduler steps to simulate (default 8000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals and acceptance (default 0)")
    parser.add_argument("--tier", choices=TIERS, help="run one tier (default: all three, compared)")
    parser.add_argument("--trace", metavar="FILE", help="arrivals from a JSON Lines file instead of the seed")
    parser.add_argument("--backend", choices=("auto", "model", "sglang"), default="auto")
    add("slots", int, "slots of the pool")
    add("context", int, "longest request in tokens")
    add("running", int, "requests that run at once")
    add("draft", int, "draft tokens a step, root included")
    parser.add_argument("--load", type=float, default=0.12, help="mean arrivals a step (default 0.12)")
    parser.add_argument(
        "--block", type=int, default=DEFAULT_BLOCK, help="decode growth in slots; 0: as needed"
    )
    add("interval", int, "scheduler steps between looks")
    add("low", float, "relocate below this mean run length")
    add("high", float, "... until it reaches this one")
    add("budget", int, "MiB to move a relocation")
    parser.add_argument("--slot-bytes", type=int, default=61 * 1152, help="bytes a slot (default 61 layers)")
    parser.add_argument(
        "--check-every", type=int, default=500, help="steps between full checks (default 500)"
    )
    parser.add_argument("--mover", action="store_true", help="time the mover on this machine's GPU instead")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON ('-' for stdout)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw run lengths over time")
    defrag_live.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the tiers; returns the exit code."""
    if args.json:
        jsonio.check_target(args.json)
    for name, value in (defrag_live.DEFAULTS if args.live else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.live:
        return defrag_live.run(args)
    if args.mover:
        return _time_mover(args)
    shape, settings = _shape(args), _settings(args)
    if args.plot:
        check_picture(args.plot)
    console = Console(stderr=args.json == jsonio.STDOUT)
    tiers = [args.tier] if args.tier else list(TIERS)
    results = [_simulate(tier, shape, settings, args, console) for tier in tiers]
    print_table(results, console)
    if args.json:
        document = {
            "format": "defrag-1",
            "settings": _recorded(args),
            "tiers": [r.as_dict() for r in results],
        }
        jsonio.write_json(document, args.json)
    if args.plot:
        plot(results, args.plot)
    return 1 if any(r.broken for r in results) else 0


def _time_mover(args: argparse.Namespace) -> int:
    from harness.defrag_mover import print_timings, time_mover

    timings = time_mover()
    print_timings(timings, Console(stderr=args.json == jsonio.STDOUT))
    if args.json:
        document = {"format": "defrag-mover-1", "timings": [t.as_dict() for t in timings]}
        jsonio.write_json(document, args.json)
    return 0 if all(t.right for t in timings) else 1


def _shape(args: argparse.Namespace) -> ServerShape:
    for name, least in (
        ("steps", 1),
        ("context", 64),
        ("running", 1),
        ("draft", 1),
        ("block", 0),
        ("check_every", 1),
        ("interval", 1),
    ):
        value = getattr(args, name)
        if value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value}: expected at least {least}")
    if args.load <= 0:
        raise UsageError(f"--load {args.load}: expected more than 0")
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed}: expected at least 0")
    least_slots = args.context + 2 * args.draft
    if args.slots < least_slots:
        raise UsageError(
            f"--slots {args.slots}: expected at least {least_slots}, one request of --context tokens"
        )
    return ServerShape(args.slots, args.context, args.running, 2048, args.draft, args.block)


def _settings(args: argparse.Namespace) -> PlannerSettings:
    try:
        return PlannerSettings(args.budget * MIB, args.slot_bytes, low=args.low, high=args.high)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _recorded(args: argparse.Namespace) -> dict[str, object]:
    return {k: v for k, v in vars(args).items() if isinstance(v, (int, float, str, type(None)))}


def _backend(tier: str, shape: ServerShape, choice: str) -> Backend:
    if choice == "model":
        return ModelBackend(shape, tier)
    from harness.defrag_sglang import SglangBackend, missing

    reason = missing()
    if reason is None:
        return SglangBackend(shape, tier)
    if choice == "sglang":
        raise UsageError(f"--backend sglang: {reason}")
    return ModelBackend(shape, tier)


def _arrivals(args: argparse.Namespace) -> Iterator[Arrival]:
    if args.trace:
        return iter(read_trace(args.trace, args.context))
    return drawn(args.seed, args.context, args.load)


def _simulate(
    tier: str, shape: ServerShape, settings: PlannerSettings, args: argparse.Namespace, console: Console
) -> TierResult:
    backend = _backend(tier, shape, args.backend)
    controller = Controller(settings, args.interval) if tier == "relocate" else None
    server = Server(shape, backend, _arrivals(args), args.seed, controller)
    began = time.perf_counter()
    broken: str | None = None
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(f"tier {tier}", total=args.steps)
            every = max(1, args.steps // SAMPLES)
            while server.totals.steps < args.steps and not server.done:
                server.step()
                if server.totals.steps % every == 0:
                    server.sample()
                    progress.update(task, completed=server.totals.steps)
                if server.totals.steps % args.check_every == 0:
                    server.check()
            server.sample()
            server.check()
    except (OwnershipError, ContentError, AssertionError) as error:
        broken = str(error)
    seconds = time.perf_counter() - began
    return TierResult(
        tier,
        backend.name,
        seconds,
        backend.calls,
        server.totals,
        tuple(server.samples),
        args.slot_bytes,
        broken,
    )
