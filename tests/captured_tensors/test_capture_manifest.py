"""The shipped cases, their manifest, and what a path stands for."""

import json
import shutil

import numpy as np
import pytest

from captured_tensors import (
    DEFAULT_CASES,
    CaptureError,
    iter_case_paths,
    load_case,
    load_manifest,
    read_manifest,
    save_case,
)
from captured_tensors.__main__ import build_manifest, main
from tests.capture_files import small_case


@pytest.fixture
def folder(tmp_path):
    """Two small cases, one in a folder below, and their manifest."""
    (tmp_path / "rank1").mkdir()
    save_case(small_case(0), tmp_path / "a.safetensors")
    save_case(small_case(1), tmp_path / "rank1" / "b.safetensors")
    (tmp_path / "manifest.json").write_text(build_manifest(tmp_path).to_json())
    return tmp_path


def test_shipped_manifest_describes_exactly_the_shipped_files():
    assert read_manifest() == build_manifest(DEFAULT_CASES.parent)


def test_shipped_cases_are_the_promised_kind():
    cases = load_manifest()
    assert len(cases) >= 8
    assert {case.meta.algorithm.split()[0] for case in cases} >= {"NGRAM", "EAGLE"}
    assert any(len(case.kv_indices) > case.kv_indptr[-1] for case in cases), "a stale kv_indices tail"
    assert any(case.bs > 1 and len(set(case.prefix_lengths)) > 1 for case in cases), "a ragged batch"
    assert sum(file.stat().st_size for file in DEFAULT_CASES.parent.iterdir()) < 12e6


@pytest.mark.parametrize("case", load_manifest(), ids=lambda c: c.name)
def test_shipped_masks_are_trees(case):
    """Every draft token sees itself and the root; row sizes are depths, so they agree with the positions."""
    for b in range(case.bs):
        mask = case.tree_mask(b)
        assert mask.diagonal().all()
        assert mask[:, 0].all()
        np.testing.assert_array_equal(
            mask.sum(axis=1) + case.prefix_lengths[b] - 1, case.positions[case.rows_of(b)]
        )


def test_paths_of_a_file_a_folder_and_a_manifest(folder):
    a, b = folder / "a.safetensors", folder / "rank1" / "b.safetensors"
    assert list(iter_case_paths(a)) == [a]
    assert list(iter_case_paths(folder)) == [a, b]
    assert list(iter_case_paths(folder / "manifest.json")) == [a, b]
    assert [case.name for case in load_manifest(folder / "manifest.json")] == ["a", "b"]


def test_nothing_there_is_an_error(tmp_path):
    with pytest.raises(CaptureError, match="no such file or folder"):
        list(iter_case_paths(tmp_path / "none"))
    with pytest.raises(CaptureError, match=r"no \.safetensors file in this folder"):
        list(iter_case_paths(tmp_path))
    with pytest.raises(CaptureError, match=r"none\.json: cannot be read"):
        list(iter_case_paths(tmp_path / "none.json"))


def test_another_file_under_the_same_name_is_refused(folder):
    shutil.copy(folder / "rank1" / "b.safetensors", folder / "a.safetensors")
    load_case(folder / "a.safetensors")
    with pytest.raises(CaptureError, match=r"a\.safetensors: sha256: found .* expected"):
        load_manifest(folder / "manifest.json")


def test_a_missing_file_is_refused(folder):
    (folder / "a.safetensors").unlink()
    with pytest.raises(CaptureError, match=r"a\.safetensors: cannot be read"):
        load_manifest(folder / "manifest.json")


def edited(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=7), "version: found 7, expected 1"),
        (lambda m: m.update(cases={}), "cases: found dict, expected a list"),
        (lambda m: m["cases"][1].pop("sha256"), r"cases\[1\]: found keys"),
        (lambda m: m["cases"][0].update(note="x"), r"cases\[0\]: found keys"),
        (lambda m: m["cases"][0].update(bs="1"), r"cases\[0\]\.bs: found '1', expected int"),
        (lambda m: m["cases"][0].update(file="../a.safetensors"), r"cases\[0\]\.file: .*below the manifest"),
        (lambda m: m["cases"][0].update(file="/etc/passwd"), r"cases\[0\]\.file"),
    ],
)
def test_broken_manifests_are_refused(folder, change, message):
    with pytest.raises(CaptureError, match=rf"manifest\.json: {message}"):
        read_manifest(edited(folder, change))


@pytest.mark.parametrize("text", ["", "[1, 2", "[]", "7"])
def test_what_is_no_manifest_is_refused(tmp_path, text):
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(CaptureError, match=r"not JSON|version: found"):
        read_manifest(path)


def test_command_lists_checks_and_renews(folder, capsys):
    assert main([str(folder / "manifest.json")]) == 0
    assert "a: bs 2, T 5, H 2, L [3, 6]" in capsys.readouterr().out
    save_case(small_case(2), folder / "a.safetensors", overwrite=True)
    assert main([str(folder / "manifest.json")]) == 2
    assert "sha256" in capsys.readouterr().err
    assert main([str(folder / "manifest.json"), "--write"]) == 0
