"""Bad input and usage: exit 2, one clear line, never a traceback."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.cli import main
from tests.harness.fakes import SMALL_CASE


def truncated(folder: Path) -> Path:
    return _write(folder / "truncated.safetensors", SMALL_CASE.read_bytes()[:4000])


def empty_file(folder: Path) -> Path:
    return _write(folder / "empty.safetensors", b"")


def text_file(folder: Path) -> Path:
    return _write(folder / "notes.txt", b"hello\n" * 100)


def foreign(folder: Path) -> Path:
    path = folder / "foreign.safetensors"
    save_file({"weight": np.zeros((3, 3), np.float32)}, path)
    return path


def other_json(folder: Path) -> Path:
    return _write(folder / "other.json", b'{"a": 1}')


def broken_json(folder: Path) -> Path:
    return _write(folder / "broken.json", b"{")


def empty_manifest(folder: Path) -> Path:
    return _write(folder / "none.json", b'{"version": 1, "cases": []}')


def empty_folder(folder: Path) -> Path:
    path = folder / "nothing"
    path.mkdir()
    return path


def missing(folder: Path) -> Path:
    return folder / "missing.safetensors"


def below_a_file(folder: Path) -> Path:
    return _write(folder / "file", b"") / "case.safetensors"


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


INPUTS = [
    truncated,
    empty_file,
    text_file,
    foreign,
    other_json,
    broken_json,
    empty_manifest,
    empty_folder,
    missing,
    below_a_file,
]


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_replay_of_unusable_input_exits_2_and_names_it(fake, tmp_path, capsys, make):
    path = make(tmp_path)
    assert main(["replay", "--device", "cpu", str(path)]) == 2
    captured = capsys.readouterr()
    assert path.name in captured.out.replace("\n", "")
    assert "1 unusable" in captured.out
    assert "Traceback" not in captured.out + captured.err


@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_show_of_unusable_input_exits_2_and_names_it(tmp_path, capsys, make):
    path = make(tmp_path)
    assert main(["show", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert path.name in captured.err
    assert len(captured.err.splitlines()) == 1


def test_one_file_that_differs_from_its_manifest_does_not_stop_the_others(fake, tmp_path):
    manifest = json.loads((SMALL_CASE.parent / "manifest.json").read_text())
    small = next(case for case in manifest["cases"] if case["name"] == SMALL_CASE.stem)
    changed = dict(small, name="changed", file="changed.safetensors")
    (tmp_path / small["file"]).write_bytes(SMALL_CASE.read_bytes())
    (tmp_path / "changed.safetensors").write_bytes(SMALL_CASE.read_bytes() + b"\0")
    (tmp_path / "m.json").write_text(json.dumps({"version": 1, "cases": [changed, small]}))
    target = tmp_path / "result.json"
    assert main(["replay", "--device", "cpu", "--json", str(target), str(tmp_path / "m.json")]) == 2
    result = json.loads(target.read_text())
    assert [case["name"] for case in result["cases"]] == [SMALL_CASE.stem]
    assert re.search("sha256", result["unusable"][0]["error"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(fake, case_file):
    os.chmod(case_file, 0)
    assert main(["replay", "--device", "cpu", str(case_file)]) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--nsplit", "0"], "--nsplit 0: expected 1 or more"),
        (["--nsplit", "many"], "invalid int value"),
        (["--permute-slots", "-1"], "expected a seed of 0 or more"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--form", "triple"], "invalid choice: 'triple'"),
        (["--json", "/no/such/folder/r.json"], "the folder /no/such/folder does not exist"),
        (["--unknown"], "unrecognized arguments"),
    ],
)
def test_bad_options_exit_2_before_any_work(fake, capsys, arguments, reason):
    assert main(["replay", *arguments]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.out == ""
    assert fake.poisoned == 0


def test_a_gpu_that_is_not_there_exits_2(fake, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["replay", "--device", "gpu"]) == 2
    assert "--device gpu: found no usable NVIDIA GPU" in capsys.readouterr().err
