"""Equal keys mean equal cubins: whatever changes the code changes the key, and nothing else does."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import toy_kernels

from verify_numba.gpu import cache_key as keys
from verify_numba.gpu.cache_key import cache_key

CC = (9, 0)


class Tile:
    """Its repr holds an address, which differs from process to process."""


def make(columns, tile=None):
    return lambda: None


def built_with(build):
    return dataclasses.replace(toy_kernels.FILL, build=build)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"threads": 256},
        {"smem_bytes": 16},
        {"max_registers": 100},
        {"min_blocks": 2},
        {"build": toy_kernels.build_ranks},
    ],
)
def test_every_field_counts(changes):
    assert cache_key(dataclasses.replace(toy_kernels.FILL, **changes), CC) != cache_key(toy_kernels.FILL, CC)


def test_the_architecture_counts():
    assert cache_key(toy_kernels.FILL, (12, 0)) != cache_key(toy_kernels.FILL, (9, 0))


def test_what_a_factory_closes_over_counts():
    def factory(columns):
        def build():
            return columns

        return build

    keys_of = [cache_key(built_with(factory(columns)), CC) for columns in (1, 1, 2)]
    assert keys_of[0] == keys_of[1] != keys_of[2]


def test_what_a_partial_binds_counts():
    builds = [functools.partial(make, 1), functools.partial(make, 1), functools.partial(make, 2)]
    builds.append(functools.partial(make, 1, tile=Tile()))
    one, same, two, tiled = (cache_key(built_with(build), CC) for build in builds)
    assert one == same
    assert len({one, two, tiled}) == 3


def test_a_lambdas_defaults_count():
    builds = [lambda columns=columns: columns for columns in (1, 2)]
    assert cache_key(built_with(builds[0]), CC) != cache_key(built_with(builds[1]), CC)


def test_a_changed_source_file_counts(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "kernel.py").write_text("x = 1\n")
    (tmp_path / "b" / "kernel.py").write_text("x = 2\n")
    first, second = (cache_key(toy_kernels.FILL, CC, tmp_path / name) for name in "ab")
    assert first != second


def test_a_toolchain_version_counts(monkeypatch):
    before = cache_key(toy_kernels.FILL, CC)
    monkeypatch.setattr(keys, "_version", lambda name: "99.0" if name == "nvidia-nvjitlink" else None)
    keys._toolchain.cache_clear()
    try:
        assert cache_key(toy_kernels.FILL, CC) != before
    finally:
        keys._toolchain.cache_clear()


def test_the_key_is_the_same_in_another_process():
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import functools, dataclasses, toy_kernels, test_cache_key as t\n"
        "print(t.cache_key(t.built_with(functools.partial(t.make, 1, tile=t.Tile())), t.CC))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    spec = built_with(functools.partial(make, 1, tile=Tile()))
    assert done.stdout.strip() == cache_key(spec, CC)
