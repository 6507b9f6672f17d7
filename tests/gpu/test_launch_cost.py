"""What a launch costs the host, without a GPU: everything but the driver's own part."""

from __future__ import annotations

import ctypes
import timeit

import pytest

from verify_numba.gpu.kernel import LoadedFunction, LoadedKernel
from verify_numba.gpu.spec import KernelSpec

ARG_FORMAT = "q" * 14 + "i" * 8 + "ff"
BUDGET_US = 15.0
"""The most that a whole verify call, two launches, may cost the host."""


class NoDriver:
    """Launches through a C function that takes nothing and returns 0."""

    def launcher(self):
        try:
            no_op = ctypes.CDLL("libm.so.6").fegetround
        except OSError:
            pytest.skip("the measurement needs the C library's fegetround")
        no_op.argtypes = (ctypes.c_void_p,) * 4
        no_op.restype = ctypes.c_int
        return no_op


def test_two_launches_with_new_arguments_are_far_below_the_budget(capsys):
    spec = KernelSpec("some", lambda: None, lambda: (), threads=256, smem_bytes=90_000)
    function = LoadedFunction(spec, 1, ARG_FORMAT, registers=40, static_smem=0, local_bytes=0)
    first, second = LoadedKernel(NoDriver(), function), LoadedKernel(NoDriver(), function)
    values = (*(0x7F0012345678 + i for i in range(14)), *range(8), 0.5, 1.0)

    def call():
        for kernel in (first, second):
            kernel.bind(*values)
            kernel.launch(7)

    count = 2000
    best = min(timeit.repeat(call, number=count, repeat=10)) / count * 1e6
    with capsys.disabled():
        print(f"\nhost cost of two launches of {len(ARG_FORMAT)} arguments, driver apart: {best:.2f} us")
    assert best < BUDGET_US
