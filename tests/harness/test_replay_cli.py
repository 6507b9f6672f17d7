"""`replay` end to end through `main`, with a fake in the Verifier's place."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from captured_tensors import save_case
from harness.cli import main
from harness.replay_json import SCHEMA
from tests.harness.fakes import SMALL_CASE, small_case
from verify_numba import VerifyInputError


def replay_json(tmp_path, *arguments):
    target = tmp_path / "result.json"
    code = main(["replay", "--device", "cpu", "--json", str(target), *map(str, arguments)])
    return code, json.loads(target.read_text())


def off_everywhere(batch, out, lse):
    out += out.dtype.type(1.0)


def test_a_right_run_exits_0_and_says_what_it_found(fake, case_file, capsys):
    assert main(["replay", "--device", "cpu", str(case_file)]) == 0
    text = capsys.readouterr().out
    for line in ("kernels prefix", "kernels tail", "kernels whole", "captured whole", "kern-captured"):
        assert line in text
    assert "bs 2, T 9, H 8, L 24, 63" in text
    assert "1 case on CPU" in text
    assert "slots permuted" not in text


def test_a_mismatch_exits_1_and_names_the_place(fake, case_file, capsys):
    def plant(batch, out, lse):
        out[12, 5, 300] = np.nan

    fake.plant = plant
    assert main(["replay", "--device", "cpu", str(case_file)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "kernels off" in text
    assert "worst at request 1, token 3, head 5, column 300: nan" in text


def test_a_wrong_captured_output_exits_1_and_is_named(fake, tmp_path, capsys):
    case = small_case()
    save_case(small_case(out_triton=-case.out_triton), tmp_path / "wrong.safetensors")
    assert main(["replay", "--device", "cpu", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "captured output off" in text
    assert "kernels off" not in text


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("plant", [None, off_everywhere])
def test_every_line_fits_the_terminal(fake, case_file, capsys, monkeypatch, columns, plant):
    monkeypatch.setenv("COLUMNS", str(columns))
    fake.plant = plant or fake.plant
    main(["replay", "--device", "cpu", "--permute-slots", "1", str(case_file)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)


def test_brief_leaves_out_what_passed(fake, case_file, capsys):
    assert main(["replay", "--device", "cpu", "--brief", str(case_file)]) == 0
    assert "kernels tail" not in capsys.readouterr().out
    fake.plant = off_everywhere
    assert main(["replay", "--device", "cpu", "--brief", str(case_file)]) == 1
    assert "kernels tail" in capsys.readouterr().out


def test_the_json_result(fake, case_file, tmp_path):
    code, result = replay_json(tmp_path, case_file, "--permute-slots", 4, "--nsplit", 3)
    assert code == result["exit_code"] == 0
    assert result["schema"] == SCHEMA
    assert set(result) == {"schema", "versions", "device", "settings", "exit_code", "cases", "unusable"}
    assert {"verify-numba", "python", "numpy", "numba-cuda", "torch"} <= set(result["versions"])
    assert result["device"]["kind"] == "cpu"
    assert result["settings"] == {"permute_slots": 4, "nsplit": 3, "form": "auto", "lanes_arrive": False}
    assert result["unusable"] == []
    (case,) = result["cases"]
    assert (case["name"], case["bs"], case["N"], case["T"], case["H"]) == ("small", 2, 18, 9, 8)
    assert (case["prefix_lengths"], case["draft_lengths"]) == ([24, 63], [9, 9])
    assert (case["verdict"], case["kernels_ok"], case["captured_ok"]) == ("pass", True, True)
    assert set(case["kernel_seconds"]) == {"prefix", "tail", "whole"}
    assert len(case["comparisons"]) == 3 * 2 + 2 + 2
    for comparison in case["comparisons"]:
        assert comparison["passed"] is True
        assert 0 <= comparison["budget_use"] <= 1
        assert set(comparison["worst"]) == {
            "request",
            "token",
            "head",
            "column",
            "got",
            "expected",
            "tolerance",
        }
        assert (comparison["max_bf16_ulp"] is None) == (comparison["tensor"] == "lse")


def test_lanes_arrive_is_among_the_settings_and_changes_no_result(case_file, tmp_path):
    (code, plain), (other, lanes) = (replay_json(tmp_path, case_file, *flag) for flag in ((), ("--lanes-arrive",)))
    assert (code, other) == (0, 0)
    assert lanes["settings"] == {**plain["settings"], "lanes_arrive": True}
    first, second = plain["cases"][0]["comparisons"], lanes["cases"][0]["comparisons"]
    assert first == second


def test_nan_in_a_json_result(fake, case_file, tmp_path):
    def plant(batch, out, lse):
        out[0, 0, 0] = np.nan

    fake.plant = plant
    code, result = replay_json(tmp_path, case_file)
    (case,) = result["cases"]
    assert (code, case["verdict"], case["kernels_ok"], case["captured_ok"]) == (1, "kernels off", False, True)
    first = case["comparisons"][0]
    assert (first["passed"], first["max_abs"], first["not_finite"], first["worst"]["got"]) == (
        False,
        None,
        1,
        "nan",
    )


def test_json_to_stdout_is_nothing_but_json(fake, case_file, capsys):
    assert main(["replay", "--device", "cpu", "--json", "-", str(case_file)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["cases"][0]["verdict"] == "pass"
    assert "kernels whole" in captured.err


def test_a_case_without_captured_output_in_table_and_json(fake, tmp_path, capsys):
    save_case(small_case(out_triton=None), tmp_path / "bare.safetensors")
    code, result = replay_json(tmp_path, tmp_path / "bare.safetensors")
    assert code == 0
    assert (result["cases"][0]["captured_output"], result["cases"][0]["captured_ok"]) == (False, None)
    assert "no captured output" in capsys.readouterr().out


def test_the_default_is_the_shipped_manifest(fake, tmp_path):
    code, result = replay_json(tmp_path)
    assert code == 0
    assert len(result["cases"]) == 10
    assert "ngram-bs1-t9-prefix319-layer0" in {case["name"] for case in result["cases"]}


def test_a_file_named_twice_is_replayed_once(fake, case_file, tmp_path):
    _, result = replay_json(tmp_path, case_file, case_file, tmp_path)
    assert len(result["cases"]) == 1


def test_one_bad_file_in_a_folder_does_not_stop_the_others(fake, tmp_path, capsys):
    folder = tmp_path / "cases"
    folder.mkdir()
    for name in "ac":
        shutil.copy(SMALL_CASE, folder / f"{name}.safetensors")
    (folder / "b.safetensors").write_bytes(SMALL_CASE.read_bytes()[:5000])
    code, result = replay_json(tmp_path, folder)
    assert code == 2
    assert [case["name"] for case in result["cases"]] == ["a", "c"]
    assert [entry["path"] for entry in result["unusable"]] == [str(folder / "b.safetensors")]
    assert "2 pass, 1 unusable" in capsys.readouterr().out


def test_unusable_input_beside_a_mismatch_exits_2(fake, case_file, tmp_path):
    fake.plant = off_everywhere
    code, result = replay_json(tmp_path, case_file, tmp_path / "missing")
    assert (code, result["cases"][0]["verdict"]) == (2, "kernels off")


def test_a_case_that_the_kernels_refuse_is_unusable(fake, case_file, tmp_path):
    def refuse(batch, out, lse):
        raise VerifyInputError("kv_indices", "slot 9", "less than 5")

    fake.plant = refuse
    code, result = replay_json(tmp_path, case_file)
    assert code == 2
    assert result["unusable"][0]["error"] == "kv_indices is slot 9, expected less than 5"


def test_a_kernel_that_faults_exits_1_and_says_how(fake, case_file, tmp_path, capsys):
    def crash(batch, out, lse):
        raise RuntimeError("an illegal memory access")

    fake.plant = crash
    code, result = replay_json(tmp_path, case_file, "--permute-slots", 2)
    (case,) = result["cases"]
    assert (code, case["verdict"], len(case["faults"])) == (1, "kernels off", 3)
    assert "kernels tail: RuntimeError: an illegal memory access" in capsys.readouterr().out


def test_a_machine_that_cannot_run_the_kernels_exits_2(monkeypatch, case_file, tmp_path):
    class Unsupported:
        def __init__(self, **settings):
            raise RuntimeError("compute capability 7.5, expected 8.0 or higher")

    monkeypatch.setattr("harness.kernels.Verifier", Unsupported)
    code, result = replay_json(tmp_path, case_file)
    assert code == 2
    assert "cannot run here: compute capability 7.5" in result["unusable"][0]["error"]


def test_a_setting_that_the_kernels_refuse_is_said_once(capsys):
    assert main(["replay", "--device", "cpu", "--nsplit", "1000000"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("verify-numba: error: --nsplit is 1000000")
    assert len(error.splitlines()) == 1
