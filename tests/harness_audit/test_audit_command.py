"""The audit as a whole: toy kernels with one fault each, through the compiler and the binary tools."""

from __future__ import annotations

import argparse
import json

import pytest

from harness import audit
from harness.audit_tools import find_tools
from harness.errors import UsageError

pytest.importorskip("numba_cuda", reason="the audit compiles kernels, which needs numba-cuda")

try:
    find_tools()
except UsageError as absent:
    pytest.skip(str(absent), allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    """One cache for all tests here, so that a toy is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERIFY_NUMBA_CACHE", str(tmp_path_factory.mktemp("cubins")))
        yield


def run(provider: str, *options: str) -> int:
    parser = argparse.ArgumentParser()
    audit.add_arguments(parser)
    return audit.run_with(parser.parse_args([*options, "--jobs", "1"]), f"toy_variants:{provider}")


def test_good_variants_pass_on_every_architecture(capsys, tmp_path):
    assert run("good", "--json", str(tmp_path / "audit.json")) == 0
    said = capsys.readouterr().out
    assert "9 of 9 pass" in said  # six architectures, three of them with clusters
    assert "FAIL" not in said
    result = json.loads((tmp_path / "audit.json").read_text())
    assert result["passed"] is True
    assert [line["cc"] for line in result["variants"] if line["variant"] == "pair"] == ["9.0", "10.0", "12.0"]
    clean = result["variants"][0]
    assert clean["static_smem"] == 96 * 4
    assert clean["counts"]["bar"] == 1
    assert result["toolchain"]["numba-cuda"]


FAULTS = {
    "spilling": ("spilling on sm_90: spills: ", "spilling on sm_120: local memory: "),
    "tensor-map": ("tensor-map on sm_90, sm_120: forbidden instruction: tensor map",),
    "too-large": ("too-large on sm_120: 101,392 B of shared memory, a block has 101,376 B",),
    "crowded": ("crowded on sm_120: 1 blocks fit on an SM, its spec wants 2",),
    "not-ptx": ("nvJitLink cannot assemble", "Not a name of any known instruction: 'no'"),
    "untypable": ("untypable on sm_90, sm_120: ", "does not compile", "no_such_method"),
}


@pytest.mark.parametrize("variant", FAULTS)
def test_each_fault_is_found_and_named(capsys, variant):
    assert run("everything", "--cc", "9.0", "12.0", "--variant", variant) == 1
    said = " ".join(capsys.readouterr().out.split())
    for words in FAULTS[variant]:
        assert words in said


def test_the_largest_block_of_sm_120_passes():
    assert run("everything", "--cc", "12.0", "--variant", "largest") == 0


@pytest.mark.parametrize(
    ("provider", "words"),
    [
        ("without_clusters", "sm_90: no variant with clusters"),
        ("only_clusters", "sm_90: no variant without clusters"),
    ],
)
def test_a_missing_form_fails_though_all_others_pass(capsys, provider, words):
    assert run(provider, "--cc", "9.0") == 1
    assert words in capsys.readouterr().out


def test_processes_give_the_same_result_as_one(capsys, tmp_path):
    parser = argparse.ArgumentParser()
    audit.add_arguments(parser)
    results = []
    for jobs in ("1", "2"):
        target = tmp_path / f"{jobs}.json"
        args = parser.parse_args(["--cc", "9.0", "12.0", "--json", str(target), "--jobs", jobs])
        assert audit.run_with(args, "toy_variants:good") == 0
        results.append(json.loads(target.read_text()))
    assert results[0] == results[1]


def test_code_can_be_kept(tmp_path):
    run("good", "--cc", "12.0", "--variant", "clean", "--keep", str(tmp_path / "code"))
    kept = tmp_path / "code"
    assert ".target sm_120" in (kept / "clean-sm_120.ptx").read_text()
    assert (kept / "clean-sm_120.cubin").read_bytes().startswith(b"\x7fELF")
    assert "BAR.SYNC" in (kept / "clean-sm_120.sass").read_text()


@pytest.mark.parametrize(
    ("provider", "options", "words"),
    [
        ("good", ["--cc", "7.5"], "--cc 7.5: expected one of 8.0, 8.6"),
        ("good", ["--variant", "cleen"], "--variant cleen: expected one of clean, pair"),
        ("good", ["--cc", "8.0", "--variant", "pair"], "none of pair is used on 8.0"),
        ("good", ["--json", "/no/such/folder/a.json"], "--json /no/such/folder/a.json"),
        ("twice", [], "more than one variant called clean"),
        ("none", [], "lists no variant"),
    ],
)
def test_unusable_requests_are_refused_in_words(provider, options, words):
    with pytest.raises(UsageError, match=words):
        run(provider, *options)


def test_json_on_standard_output_is_nothing_but_json(capsys):
    assert run("good", "--cc", "9.0", "--json", "-") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["passed"] is True
    assert "3 of 3" not in said.out
    assert "2 of 2 pass" in said.err
