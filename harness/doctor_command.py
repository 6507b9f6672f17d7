"""`doctor`: what this machine can run and why."""

from __future__ import annotations

import argparse
import re

from harness.doctor_report import diagnose
from harness.errors import UsageError
from harness.fatbin import ComputeCapability
from harness.jsonio import STDOUT, check_target, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write what was found for machines; - is stdout")
    parser.add_argument("--cc", metavar="X.Y", help="judge libraries for this compute capability instead")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, or 1 where something is in the way of running the kernels."""
    asked = _compute_capability(args.cc) if args.cc else None
    if args.json:
        check_target(args.json)
    diagnosis = diagnose(asked)
    if args.json:
        write_json(diagnosis.as_json(), args.json)
    if args.json != STDOUT:
        print(diagnosis.text())
    return int(diagnosis.has_problem)


def _compute_capability(text: str) -> ComputeCapability:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if not match:
        raise UsageError(f"--cc: {text!r} is not a compute capability such as 12.0")
    return int(match[1]), int(match[2])
