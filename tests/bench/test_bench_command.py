import json

import pytest
import torch

from harness import bench_machine, bench_options, bench_run, bench_shapes
from harness.cli import main
from harness.work import Ceilings


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_run, "measure_ceilings", lambda device: Ceilings(1e9, 1e12))


def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "--preset", "targets"]) == 2
    error = capsys.readouterr().err
    assert "no NVIDIA GPU" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "targets", "--H", "8"], "--preset stands alone"),
        (["--preset", "targets", "--lengths", "1,2"], "--preset stands alone"),
        (["--T", "65"], "T: 65 is outside 1 to 64"),
        (["--H", "8,x"], "--H: 'x'"),
        (["--mode", "warp"], "--mode: 'warp'"),
        (["--nsplit", "0"], "--nsplit: 0 is below 1"),
        (["--form", "triple"], "--form: 'triple'"),
        (["--slots", "1"], "--slots: '1'"),
        (["--device", "tpu"], "--device: 'tpu'"),
        (["--device", "cpu", "--peers", "nobody"], "--peers: 'nobody'"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json"),
    ],
)
def test_bad_options_give_one_line(capsys, options, message):
    assert main(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_run_from_the_command_line(subject, tmp_path, capsys):
    target = tmp_path / "result.json"
    options = ["--device", "cpu", "--H", "2", "--T", "3", "--L", "50,0", "--peers", "torch"]
    code = main(["bench", *options, "--pass-seconds", "0", "--commit", "abc", "--json", str(target)])
    assert code == 0
    result = json.loads(target.read_text())
    assert result["commit"] == "abc" and result["complete"]
    assert [r["lengths"] for r in result["results"]] == [[50], [0]]


def test_lengths_alone_are_the_only_shape(subject, capsys):
    options = ["--device", "cpu", "--H", "1", "--T", "2", "--lengths", "30,1,0", "--peers", "none"]
    assert main(["bench", *options, "--pass-seconds", "0", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [r["lengths"] for r in result["results"]] == [[30, 1, 0]]


def test_the_commit_of_a_copy_without_its_history(subject, monkeypatch, tmp_path):
    monkeypatch.setenv(bench_machine.COMMIT_VARIABLE, "0123abcd")
    target = tmp_path / "result.json"
    options = ["--device", "cpu", "--preset", "quick", "--pass-seconds", "0", "--json", str(target)]
    monkeypatch.setattr(bench_shapes, "PRESETS", {"quick": (bench_shapes.BenchShape((9,), 2, 1),)})
    monkeypatch.setattr(bench_options, "PRESETS", bench_shapes.PRESETS)
    assert main(["bench", *options]) == 0
    result = json.loads(target.read_text())
    assert result["commit"] == "0123abcd"
    assert result["peers"] == {} and result["results"][0]["peers"] == {}  # quick is ours alone


def test_list_peers(capsys):
    assert main(["bench", "--device", "cpu", "--list-peers"]) == 0
    out = capsys.readouterr().out
    assert "torch: ready" in out and "flashinfer-fa3: " in out
