from __future__ import annotations

import numpy as np
import pytest

from captured_tensors import save_case
from harness.cli import main
from tests.harness.fakes import SMALL_CASE, small_case
from tests.trees import ancestors


def show(capsys, *arguments):
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def saved(tmp_path, request_0_mask):
    """The small case with another tree in request 0 (prefix 24, nine draft tokens)."""
    mask = small_case().custom_mask.copy()
    rows = mask[: 9 * 33].reshape(9, 33)
    rows[:, 24:] = request_0_mask
    path = tmp_path / "changed.safetensors"
    save_case(small_case(custom_mask=mask, out_triton=None), path)
    return path


def test_shapes_and_provenance(capsys):
    text = show(capsys, SMALL_CASE)
    assert "bs 2, N 18 draft tokens, T 9, H 8 heads, L 24, 63" in text
    assert "[18, 8, 576]" in text
    assert "bfloat16" in text
    assert "NVIDIA H200" in text
    assert "0.13086079996295005" in text


def test_a_shipped_case_is_found_by_its_name(capsys):
    assert show(capsys, SMALL_CASE.stem) == show(capsys, SMALL_CASE)


def test_the_tree_is_drawn(capsys, tmp_path):
    text = show(capsys, saved(tmp_path, ancestors([-1, 0, 0, 1, 1, 2, 5, 6, 7])))
    first = text[text.index("request 0") : text.index("request 1")]
    assert "tree of depth 6" in first
    assert "0 @24\n├── 1 @25\n│   ├── 3 @" in first
    assert "3 ■ ■ · ■ · · · · ·" in first


def test_a_forest_is_named_as_one(capsys, tmp_path):
    assert "forest of 2 roots" in show(capsys, saved(tmp_path, ancestors([-1, 0, 1, 2, -1, 4, 5, 6, 7])))


def test_a_mask_that_is_no_tree_is_drawn_as_a_matrix_alone(capsys, tmp_path):
    text = show(capsys, saved(tmp_path, np.ones((9, 9), np.bool_)))
    first = text[text.index("request 0") : text.index("request 1")]
    assert "not a tree" in first
    assert "├" not in first
    assert first.count(" ■ ■ ■ ■ ■ ■ ■ ■ ■\n") == 9


def test_a_tree_too_deep_for_the_terminal_is_a_list(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = " ".join(show(capsys, saved(tmp_path, ancestors([-1, 0, 1, 2, 3, 4, 5, 6, 7]))).split())
    assert "tree of depth 9; token<parent: 0<root, 1<0, 2<1" in text


def test_output_not_recorded_is_said(capsys, tmp_path):
    assert "not recorded" in show(capsys, saved(tmp_path, np.eye(9, dtype=np.bool_)))


@pytest.mark.parametrize("columns", [80, 120])
def test_every_line_fits_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, show(capsys, "eagle-bs3-t16-prefix2_2_40-layer0").splitlines())) <= columns
