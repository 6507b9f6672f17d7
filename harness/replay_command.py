"""`replay [PATH...]`: captured verify steps through the kernels, judged against float64."""

from __future__ import annotations

import argparse

from rich.console import Console

from captured_tensors import CaptureError
from harness.case_files import CaseFile, Unusable, find_cases, message
from harness.devices import DEVICES, Device, select_device
from harness.errors import UsageError
from harness.jsonio import STDOUT, check_target, write_json
from harness.kernels import FORMS, MakeBackend, SettingRefused, Verifiers
from harness.progress import Bar
from harness.replay import CaseReport, Options, Verdict, replay
from harness.replay_json import replay_json
from harness.replay_table import LEGEND, case_block, heading, summary, unusable_line
from verify_numba import VerifyInputError

SETTINGS = ("permute_slots", "nsplit", "form", "lanes_arrive")
"""What the JSON result says of the options."""
EXIT_PASS, EXIT_MISMATCH, EXIT_UNUSABLE = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="case file, folder or manifest; default: the shipped captures",
    )
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="where the kernels run; default: auto"
    )
    parser.add_argument(
        "--permute-slots", type=int, metavar="SEED", help="run again, every row at another slot: bit-equal?"
    )
    parser.add_argument(
        "--nsplit", type=int, metavar="N", help="splits of a prefix; default: the plan chooses"
    )
    parser.add_argument(
        "--form", choices=FORMS, default="auto", help="kernel form; default: the plan chooses"
    )
    parser.add_argument(
        "--lanes-arrive",
        action="store_true",
        help="every lane arrives at barriers for itself: slower; for compute-sanitizer's racecheck, which does not "
        "follow a warp barrier to the arrival behind it",
    )
    parser.add_argument("--brief", action="store_true", help="show comparisons only where one failed")
    parser.add_argument("--json", metavar="FILE", help="write JSON; -: to stdout, and the table to stderr")


def run(args: argparse.Namespace) -> int:
    if args.permute_slots is not None and args.permute_slots < 0:
        raise UsageError(f"--permute-slots {args.permute_slots}: expected a seed of 0 or more")
    if args.nsplit is not None and args.nsplit < 1:
        raise UsageError(f"--nsplit {args.nsplit}: expected 1 or more")
    if args.json:
        check_target(args.json)
    device = select_device(args.device)
    make_backend = Verifiers(device, nsplit=args.nsplit, form=args.form, lanes_arrive=args.lanes_arrive)
    return run_replay(args, device, make_backend)


def run_replay(args: argparse.Namespace, device: Device, make_backend: MakeBackend) -> int:
    """Replay everything that `args` names and report it; returns the exit code."""
    console = Console(stderr=args.json == STDOUT, highlight=False)
    options = Options(args.permute_slots)
    files, unusable = find_cases(args.paths)
    for bad in unusable:
        console.print(unusable_line(bad))
    reports = []
    if files and not args.brief:
        console.print(heading())
    with Bar(len(files) * options.steps) as bar:
        for i, file in enumerate(files):
            bar.name(f"{file.path.stem[:32]}")
            outcome = _replay_file(file, device, make_backend, options, bar)
            bar.at((i + 1) * options.steps)
            with bar.aside():
                if isinstance(outcome, Unusable):
                    unusable.append(outcome)
                    console.print(unusable_line(outcome))
                else:
                    reports.append(outcome)
                    console.print(case_block(outcome, brief=args.brief))
    description = device.describe()
    console.print("", summary(reports, unusable, str(description["name"])), sep="\n")
    if reports and not args.brief:
        console.print(LEGEND, style="dim")
    code = exit_code(reports, unusable)
    if args.json:
        settings = {name: getattr(args, name) for name in SETTINGS}
        result = replay_json(reports, unusable, device=description, settings=settings, exit_code=code)
        write_json(result, args.json)
    return code


def exit_code(reports: list[CaseReport], unusable: list[Unusable]) -> int:
    """Unusable input comes first: a run that skipped a case has not judged everything."""
    if unusable:
        return EXIT_UNUSABLE
    return EXIT_MISMATCH if any(r.verdict is not Verdict.PASS for r in reports) else EXIT_PASS


def _replay_file(
    file: CaseFile, device: Device, make_backend: MakeBackend, options: Options, bar: Bar
) -> CaseReport | Unusable:
    try:
        return replay(file.load(), file.path, make_backend, device, options, bar.advance)
    except SettingRefused:  # the same for every case
        raise
    except (CaptureError, VerifyInputError, UsageError, OSError) as error:
        return Unusable(str(file.path), message(error, file.path))
