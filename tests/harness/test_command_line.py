"""The frame around the commands: registry, exit codes, and the two ways in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli, replay_command, show_command
from harness.cli import main
from harness.commands import COMMANDS, Command
from harness.errors import UsageError
from tests.harness.fakes import SMALL_CASE

ROOT = Path(cli.__file__).parent.parent


def harness(*arguments, **options):
    """`python -m harness` in a process of its own."""
    command = [sys.executable, "-m", "harness", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("verify-numba ")


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command.name}" in text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_every_command_loads_and_has_help(command, capsys):
    assert main([command.name, "--help"]) == 0
    assert f"usage: verify-numba {command.name}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["fly"], ["--fly"]])
def test_no_or_an_unknown_command_exits_2(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: verify-numba" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, ""),
        (
            UsageError("H: found 0, expected 1 or more"),
            2,
            "verify-numba: error: H: found 0, expected 1 or more\n",
        ),
        (
            PermissionError(13, "Permission denied", "x.json"),
            2,
            "verify-numba: error: x.json: Permission denied\n",
        ),
        (OSError(28, "No space left on device"), 2, "verify-numba: error: No space left on device\n"),
    ],
)
def test_errors_become_exit_codes(monkeypatch, capsys, error, code, text):
    def fail(args):
        raise error

    monkeypatch.setattr(show_command, "run", fail)
    assert main(["show", "x"]) == code
    assert capsys.readouterr().err == text


def test_an_error_of_the_program_itself_is_not_hidden(monkeypatch):
    monkeypatch.setattr(show_command, "run", lambda args: {}["bug"])
    with pytest.raises(KeyError):
        main(["show", "x"])


def test_a_command_whose_package_is_missing_says_which(monkeypatch, capsys):
    def load(self):
        raise ModuleNotFoundError("No module named 'pynvml'", name="pynvml")

    monkeypatch.setattr(Command, "load", load)
    assert main(["show", "x"]) == 2
    assert "show: the package 'pynvml' is not installed" in capsys.readouterr().err


def test_only_the_wanted_command_is_imported():
    script = "import sys; from harness.cli import main; main(['--version']); print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for heavy in ("numba", "torch", "numpy", "rich"):
        assert f"'{heavy}'" not in done.stdout


def test_an_interrupted_replay_is_quiet(fake, case_file, capsys):
    def interrupt(batch, out, lse):
        raise KeyboardInterrupt

    fake.plant = interrupt
    assert main(["replay", "--device", "cpu", str(case_file)]) == 130
    assert capsys.readouterr().err == ""


def test_python_dash_m_replays_with_the_real_kernels(tmp_path):
    done = harness("replay", "--device", "cpu", "--permute-slots", "1", SMALL_CASE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 pass" in done.stdout


def test_python_dash_m_reports_unusable_input(tmp_path):
    done = harness("replay", "--device", "cpu", tmp_path / "missing")
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr


def test_a_closed_pipe_is_quiet():
    done = subprocess.run(
        f"{sys.executable} -m harness show {SMALL_CASE} | head -n 1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr == ""
    assert done.stdout.strip() == SMALL_CASE.stem


def test_an_encoding_without_the_glyphs_is_no_error():
    done = harness("show", SMALL_CASE, env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "50"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 # # . ." in done.stdout


def test_settings_reach_the_verifier(monkeypatch, case_file):
    made = []

    class Recorder:
        def __init__(self, **settings):
            made.append(settings)
            raise UsageError("enough")

    monkeypatch.setattr("harness.kernels.Verifier", Recorder)
    options = ["--nsplit", "5", "--form", "single", "--lanes-arrive"]
    assert main(["replay", "--device", "cpu", *options, str(case_file)]) == 2
    settings = {"device": "cpu", "nsplit": 5, "form": "single", "lanes_arrive": True}
    assert made == [{"max_bs": 2, "T": 9, "H": 8, **settings}]


def test_a_verifier_is_made_once_a_shape(monkeypatch, fake):
    made = []

    class Recorder:
        def __init__(self, **settings):
            made.append((settings["max_bs"], settings["T"], settings["H"]))

        def warmup(self):
            pass

        poison_workspace, verify = fake.poison_workspace, fake.verify

    monkeypatch.undo()
    monkeypatch.setattr("harness.kernels.Verifier", Recorder)
    assert main(["replay", "--device", "cpu", "--brief"]) == 0
    assert sorted(made) == [(1, 9, 8), (2, 9, 8), (3, 16, 8), (4, 9, 8), (8, 16, 4)]
    assert replay_command.Verifiers.__name__ == "Verifiers"
