"""`audit`: every kernel variant, compiled for every architecture and judged by its machine code.."""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from harness.audit_limits import LIMITS
from harness.audit_measure import Finding, Job, audit, missing, specs_of
from harness.audit_report import PLAIN_WIDTH, as_json, print_report
from harness.audit_tools import find_tools
from harness.errors import UsageError
from harness.jsonio import STDOUT, check_target, write_json
from verify_numba.gpu.spec import ComputeCapability

PROVIDER = "verify_numba.variants:all_specs"
_NEEDED = {"numba_cuda": "numba-cuda", "cuda.bindings": "cuda-bindings"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `audit`."""
    known = ", ".join(_text(cc) for cc in LIMITS)
    parser.add_argument("--cc", nargs="+", metavar="CC", help=f"compute capabilities (default: {known})")
    parser.add_argument("--variant", nargs="+", metavar="NAME", help="only these variants")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON ('-' for standard output)")
    parser.add_argument("--keep", metavar="DIR", help="write PTX, cubin and SASS of every variant there")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one a core)"
    )


def run(args: argparse.Namespace) -> int:
    """Audit; 0 when every variant passes, 1 otherwise. UsageError for what the user can put right."""
    return run_with(args, PROVIDER)


def run_with(args: argparse.Namespace, provider: str) -> int:
    """`run` over the variants of `provider`, a `module:function`."""
    _check_installed()
    if args.json:
        check_target(args.json)
    if args.jobs < 1:
        raise UsageError(f"--jobs is {args.jobs}, expected at least 1")
    ccs = [_parse(text) for text in args.cc] if args.cc else list(LIMITS)
    specs = specs_of(provider)
    names = _chosen(args.variant, [spec.name for spec in specs])
    keep = _folder(args.keep)
    tools = find_tools()
    jobs = [
        Job(provider, spec.name, cc, tools, keep)
        for spec in specs
        for cc in ccs
        if spec.name in names and spec.used_on(cc)
    ]
    if not jobs:
        raise UsageError(f"none of {', '.join(names)} is used on {', '.join(map(_text, ccs))}")
    lacking = [] if args.variant else [line for cc in ccs for line in missing(specs, cc)]
    console = _console(to_stderr=args.json == STDOUT)
    findings = _audit_all(jobs, args.jobs, console)
    print_report(findings, lacking, console)
    result = as_json(findings, lacking)
    if args.json:
        write_json(result, args.json)
    return 0 if result["passed"] else 1


def _console(to_stderr: bool) -> Console:
    console = Console(stderr=to_stderr)
    return console if console.is_terminal else Console(stderr=to_stderr, width=PLAIN_WIDTH)


def _audit_all(jobs: list[Job], processes: int, console: Console) -> list[Finding]:
    """Findings in the order of `jobs`."""
    done: dict[int, Finding] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(jobs))
        for index, finding in _completed(jobs, min(processes, len(jobs))):
            done[index] = finding
            progress.advance(task)
    return [done[index] for index in range(len(jobs))]


def _completed(jobs: list[Job], processes: int) -> Iterator[tuple[int, Finding]]:
    if processes == 1:
        yield from enumerate(map(audit, jobs))
        return
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the locks of this process's threads
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        index_of = {pool.submit(audit, job): index for index, job in enumerate(jobs)}
        for future in as_completed(index_of):
            yield index_of[future], future.result()


def _check_installed() -> None:
    for module, package in _NEEDED.items():
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise UsageError(f"audit compiles kernels: that needs the package {package}, it is not installed")


def _parse(text: str) -> ComputeCapability:
    for cc in LIMITS:
        if text == _text(cc):
            return cc
    raise UsageError(f"--cc {text}: expected one of {', '.join(map(_text, LIMITS))}")


def _text(cc: ComputeCapability) -> str:
    return f"{cc[0]}.{cc[1]}"


def _chosen(wanted: list[str] | None, names: list[str]) -> list[str]:
    """Kernels by their names; a variant's own name, as plans and documents have it, will do."""
    wanted = [f"verify_{name}" if f"verify_{name}" in names else name for name in wanted or ()]
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise UsageError(f"--variant {' '.join(unknown)}: expected one of {', '.join(names)}")
    return wanted or names


def _folder(text: str | None) -> Path | None:
    if text is None:
        return None
    folder = Path(text)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
