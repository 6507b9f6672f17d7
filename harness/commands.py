"""The subcommands. One line here adds one; its module is imported only when the command is asked for.

A command module has two functions:

    def add_arguments(parser: argparse.ArgumentParser) -> None
    def run(args: argparse.Namespace) -> int        # the exit code

and may raise `harness.errors.UsageError` for anything that the user can put right.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol, cast


class CommandModule(Protocol):
    """What a module named in `COMMANDS` offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


@dataclass(frozen=True)
class Command:
    """One subcommand: its name, the module that implements it, and its line in `--help`."""

    name: str
    module: str
    help: str

    def load(self) -> CommandModule:
        return cast(CommandModule, importlib.import_module(self.module))


COMMANDS = (
    Command("replay", "harness.replay_command", "replay captured steps and judge them against float64"),
    Command("show", "harness.show_command", "print a captured step's shapes and draw its trees and masks"),
    Command(
        "bench", "harness.bench_command", "time the kernels against the machine and against other kernels"
    ),
    Command("report", "harness.report_command", "draw pictures and one page from benchmark results"),
    Command(
        "audit",
        "harness.audit",
        "compile every kernel for every architecture and judge the code, without a GPU",
    ),
    Command("model", "harness.model", "predict a verify step on compute capability 12.0, or check the prediction"),
    Command("doctor", "harness.doctor_command", "say what this machine can run and why"),
    Command(
        "bench-context",
        "harness.bench_context_command",
        "decode speed by context length against a running server",
    ),
    Command("live", "harness.live", "run a real SGLang engine in off, validate and on, and say what differed"),
    Command(
        "install-check",
        "harness.install_check",
        "say in which processes of a server the plug-in is live, by its call counters",
    ),
    Command(
        "defrag", "harness.defrag", "simulate a server's churn and compare the tiers of defragmentation"
    ),
)
