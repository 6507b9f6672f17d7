"""The cubin cache: hits, damaged entries, folders that cannot be used."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import toy_kernels
from filelock import FileLock

from verify_numba.gpu import cache as cache_module
from verify_numba.gpu.artifact import Artifact
from verify_numba.gpu.cache import CubinCache, default_folder
from verify_numba.gpu.compile import CompileError

SPEC, CC = toy_kernels.FILL, (9, 0)
BUILT = Artifact(SPEC.name, "_Zfill", "qif", "Used 8 registers", "// PTX", b"\x7fELF cubin")


@pytest.fixture
def builds(monkeypatch) -> list[str]:
    """Stands in for the compiler; one entry a compilation."""
    names: list[str] = []

    def build(spec, cc):
        names.append(spec.name)
        return BUILT

    monkeypatch.setattr(cache_module, "build_artifact", build)
    return names


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix not in (".cubin", ".lock")]


def test_a_variant_is_built_once_and_kept_in_memory_and_on_disk(tmp_path, builds):
    first = CubinCache(tmp_path)
    assert first.get(SPEC, CC) is first.get(SPEC, CC)
    assert CubinCache(tmp_path).get(SPEC, CC) == BUILT
    assert builds == [SPEC.name]
    assert Artifact.from_bytes(first.path(SPEC, CC).read_bytes()) == BUILT
    assert leftovers(tmp_path) == []


def test_architectures_have_entries_of_their_own(tmp_path, builds):
    cache = CubinCache(tmp_path)
    cache.get(SPEC, (9, 0))
    cache.get(SPEC, (12, 0))
    assert len(builds) == 2
    assert cache.path(SPEC, (9, 0)) != cache.path(SPEC, (12, 0))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"\x7fELF of something else",
        lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
        lambda data: Artifact("another", "_Z", "q", "", "", b"\x7fELF").to_bytes(),
    ],
    ids=["truncated", "empty", "foreign", "bit-flip", "other-variant"],
)
def test_a_damaged_entry_is_built_anew_and_replaced(tmp_path, builds, damage):
    cache = CubinCache(tmp_path)
    cache.get(SPEC, CC)
    entry = cache.path(SPEC, CC)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert CubinCache(tmp_path).get(SPEC, CC) == BUILT
    assert builds == [SPEC.name] * 2
    assert entry.read_bytes() == whole


def test_an_unusable_folder_costs_one_warning_and_no_result(tmp_path, builds):
    (tmp_path / "file").write_text("not a folder")
    cache = CubinCache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="cannot be used.*VERIFY_NUMBA_CACHE") as caught:
        assert cache.get(SPEC, CC) == BUILT
        assert cache.get(SPEC, (12, 0)) == BUILT
        assert cache.get(SPEC, CC) == BUILT
    assert len(caught) == 1
    assert len(builds) == 2


def test_a_read_only_folder_still_serves_its_entries(tmp_path, builds, monkeypatch):
    CubinCache(tmp_path).get(SPEC, CC)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(cache_module.FileLock, "acquire", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CubinCache(tmp_path).get(SPEC, CC) == BUILT
    assert len(builds) == 1
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert CubinCache(tmp_path).get(SPEC, (12, 0)) == BUILT


def test_a_full_disk_costs_one_warning_and_leaves_no_half_entry(tmp_path, builds, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    cache = CubinCache(tmp_path)
    with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
        assert cache.get(SPEC, CC) == BUILT
        assert cache.get(SPEC, (12, 0)) == BUILT
    assert len(caught) == 1
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_a_process_that_never_lets_go_of_the_lock_is_not_waited_for_forever(tmp_path, builds):
    cache = CubinCache(tmp_path, lock_seconds=0.1)
    with (
        FileLock(f"{cache.path(SPEC, CC)}.lock"),
        pytest.warns(RuntimeWarning, match=r"another process has held .* for 0\.1 s"),
    ):
        assert cache.get(SPEC, CC) == BUILT


def test_a_failed_compilation_leaves_nothing_and_may_be_tried_again(tmp_path, monkeypatch):
    def fail(spec, cc):
        raise CompileError("no")

    cache = CubinCache(tmp_path)
    monkeypatch.setattr(cache_module, "build_artifact", fail)
    with pytest.raises(CompileError):
        cache.get(SPEC, CC)
    monkeypatch.setattr(cache_module, "build_artifact", lambda spec, cc: BUILT)
    assert cache.get(SPEC, CC) == BUILT


def test_the_folder_comes_from_the_variable_else_from_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("VERIFY_NUMBA_CACHE", "~/kernels")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / "kernels"
    monkeypatch.delenv("VERIFY_NUMBA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder().name == "verify-numba"


def test_a_warm_cache_needs_no_compiler(tmp_path, builds):
    CubinCache(tmp_path).get(SPEC, CC)
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import toy_kernels\n"
        "from verify_numba.gpu.cache import CubinCache\n"
        "print(CubinCache().get(toy_kernels.FILL, (9, 0)).entry, 'numba' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"VERIFY_NUMBA_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["_Zfill", "False"]
