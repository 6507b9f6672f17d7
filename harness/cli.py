"""Entry point of `verify-numba` and of `python -m harness`.

Exit codes: 0 all pass, 1 a mismatch, 2 unusable input or usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from harness.commands import COMMANDS, Command, CommandModule
from harness.errors import UsageError
from harness.versions import project_version

PROG = "verify-numba"
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

DESCRIPTION = "Replay, inspect and measure MLA + tree-mask verify attention."
EPILOG = "exit codes: 0 all pass, 1 a mismatch, 2 unusable input or usage, 130 interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Bad input gives one line on stderr, never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _never_fail_on_characters()
    try:
        args = _parser(arguments).parse_args(arguments)
        return args.run(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return EXIT_BROKEN_PIPE
    except UsageError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(_describe(error))
    except SystemExit as stop:  # argparse has printed its own message
        return stop.code if isinstance(stop.code, int) else EXIT_UNUSABLE


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"{PROG} {project_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = subparsers.add_parser(
            command.name, help=command.help, description=_sentence(command.help), epilog=EPILOG
        )
        if command.name in arguments:  # only the module that is wanted, so that --help stays quick
            module = _load(command)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def _load(command: Command) -> CommandModule:
    try:
        return command.load()
    except ModuleNotFoundError as error:
        raise UsageError(f"{command.name}: the package {error.name!r} is not installed") from error


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _describe(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def _fail(message: str) -> int:
    print(f"{PROG}: error: {message}", file=sys.stderr)
    return EXIT_UNUSABLE


def _never_fail_on_characters() -> None:
    """A terminal that lacks a character shows a question mark in its place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _forget_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
