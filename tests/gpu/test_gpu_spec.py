"""Kernel specs: values that cannot make a kernel are refused by name; reading them costs no heavy import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from verify_numba.gpu.spec import KernelSpec, arch


def spec(**changes):
    values = {"threads": 128, "smem_bytes": 0} | changes
    return KernelSpec("some", lambda: None, lambda: (), **values)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("threads", {"threads": 0}),
        ("threads", {"threads": 100}),
        ("threads", {"threads": 1056}),
        ("smem_bytes", {"smem_bytes": -1}),
        ("cluster", {"cluster": 3}),
        ("max_registers", {"max_registers": 256}),
        ("min_blocks", {"min_blocks": 0}),
        ("min_cc", {"cluster": 2}),
        ("min_cc", {"pdl": True, "min_cc": (8, 9)}),
        ("max_cc", {"max_cc": (7, 5)}),
    ],
)
def test_an_impossible_value_is_refused_by_field(field, changes):
    with pytest.raises(ValueError, match=rf"kernel some: {field} is .*, expected "):
        spec(**changes)


def test_the_range_of_architectures_includes_both_ends():
    hopper = spec(min_cc=(9, 0), max_cc=(10, 3))
    assert [cc for cc in [(8, 9), (9, 0), (10, 3), (12, 0)] if hopper.used_on(cc)] == [(9, 0), (10, 3)]
    assert spec().used_on((12, 0))
    assert not spec().used_on((7, 5))


def test_architectures_are_named_as_the_tools_name_them():
    assert [arch((8, 0)), arch((12, 0))] == ["sm_80", "sm_120"]


def test_importing_the_gpu_layer_imports_neither_numba_nor_torch():
    program = (
        "import sys, verify_numba.gpu.kernel_set, verify_numba.gpu.compile\n"
        "print([m for m in ('numba', 'torch', 'numpy', 'cuda.bindings') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
