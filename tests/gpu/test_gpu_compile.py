"""Kernel function -> PTX -> cubin, without a GPU."""

from __future__ import annotations

import dataclasses
import re

import pytest
import toy_kernels

from verify_numba.gpu.compile import (
    CompileError,
    arg_format,
    assemble,
    assemble_with_log,
    build_artifact,
    compile_ptx,
    entry_name,
)

pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

ELF = b"\x7fELF"


@pytest.fixture(scope="module")
def fill_ptx() -> str:
    return compile_ptx(toy_kernels.FILL, (9, 0))


def test_the_ptx_carries_target_and_launch_bounds(fill_ptx):
    assert ".target sm_90\n" in fill_ptx
    assert ".maxntid 128, 1, 1" in fill_ptx
    assert ".minnctapersm 1" in fill_ptx
    assert ".maxclusterrank" not in fill_ptx


def test_a_cluster_kernel_declares_its_largest_cluster():
    assert ".maxclusterrank 2" in compile_ptx(toy_kernels.RANKS, (12, 0))


@pytest.mark.parametrize("cc", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_audited_architecture_assembles(cc):
    artifact = build_artifact(toy_kernels.FILL, cc)
    assert artifact.cubin.startswith(ELF)
    assert artifact.entry.encode() in artifact.cubin
    assert artifact.arg_format == "qif"
    assert f"for 'sm_{cc[0]}{cc[1]}'" in artifact.log


def test_the_register_limit_of_the_spec_holds():
    unlimited = dataclasses.replace(toy_kernels.FILL, name="many", build=toy_kernels.build_many_registers)
    limited = dataclasses.replace(unlimited, max_registers=64)

    def used(spec):
        log = assemble_with_log(compile_ptx(spec, (9, 0)), (9, 0))[1]
        return int(re.search(r"Used (\d+) registers", log)[1])

    assert used(unlimited) > 64
    assert used(limited) <= 64


def test_ptx_of_a_newer_toolchain_is_assembled_as_the_newest_known(fill_ptx):
    newer = re.sub(r"^\.version .*$", ".version 99.9", fill_ptx, flags=re.MULTILINE)
    assert assemble(newer, (9, 0)).startswith(ELF)


def test_a_broken_ptx_gives_the_assemblers_words(fill_ptx):
    with pytest.raises(CompileError, match=r"(?s)sm_90.*such") as caught:
        assemble(fill_ptx.replace("ret;", "no.such.thing;"), (9, 0))
    assert "version" not in str(caught.value)


def test_a_kernel_that_numba_cannot_type_is_named():
    def build():
        def kernel(out, n, value):
            out.no_such_method()

        return kernel

    bad = dataclasses.replace(toy_kernels.FILL, name="bad-kernel", build=build)
    with pytest.raises(CompileError, match=r"(?s)bad-kernel does not compile for sm_120.*no_such_method"):
        compile_ptx(bad, (12, 0))


def test_the_entry_must_be_one(fill_ptx):
    assert entry_name(fill_ptx) in fill_ptx
    with pytest.raises(CompileError, match="holds 0 kernels, expected 1"):
        entry_name(".version 9.0\n")
    with pytest.raises(CompileError, match="holds 2 kernels, expected 1"):
        entry_name(fill_ptx + fill_ptx)


def test_arguments_other_than_integers_and_floats_are_refused():
    from numba import types

    assert arg_format((types.int64, types.uint64, types.int32, types.float64)) == "qQid"
    assert arg_format(types.void(types.int64, types.float32)) == "qf"
    with pytest.raises(CompileError, match="argument 1 has type array"):
        arg_format((types.int64, types.float32[:]))
