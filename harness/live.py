"""`verify-numba live`: a real SGLang engine without weights, in off, validate and on, and what differed."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from harness.errors import UsageError
from harness.jsonio import check_target, write_json
from harness.live_model import build_model
from harness.live_options import MODES, add_arguments, gpu_groups, modes_of, settings_of, spec_of
from harness.live_process import processes_end_with_this
from harness.live_report import Comparison, print_comparison
from harness.live_run import LiveRunner, refuse_without_engine
from harness.live_schedule import run_modes

__all__ = ["MODES", "add_arguments", "run"]

EXIT_AGREE, EXIT_DIFFER = 0, 1


def run(args: argparse.Namespace) -> int:
    spec, modes, settings, groups = spec_of(args), modes_of(args.modes), settings_of(args.set), gpu_groups(args)
    if args.json:
        check_target(args.json)
    refuse_without_engine(spec.tp)
    with tempfile.TemporaryDirectory(prefix="verify-numba-live-") as scratch:
        folder = args.keep.resolve() if args.keep else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = build_model(folder / "model", spec)
        runner = LiveRunner(spec, model, folder, settings, args.timeout, groups[0])
        with processes_end_with_this():
            runs, failures = run_modes(runner, modes, groups)
            if not runs:
                raise UsageError("\n".join(failures))
            comparison = Comparison.of(spec, runs, runner, args.tie, failures)
        return _tell(comparison, args.json)


def _tell(comparison: Comparison, json_target: str | None) -> int:
    for failure in comparison.failures:
        print(failure, file=sys.stderr)
    if json_target:
        from harness.bench_machine import describe_here  # needs torch, whose absence is said before

        write_json({**comparison.as_json(), **describe_here()}, json_target)
    if json_target != "-":
        print_comparison(comparison)
    return EXIT_AGREE if comparison.agrees else EXIT_DIFFER
