"""Launches against a pretended libcuda: what reaches the driver, and what it costs the host."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from fake_cuda import FUNCTION, LAUNCH_FAILED, FakeCuda
from hypothesis import given
from hypothesis import strategies as st

from verify_numba.gpu import structs
from verify_numba.gpu.driver import CudaError, Driver
from verify_numba.gpu.kernel import LoadedFunction, LoadedKernel
from verify_numba.gpu.spec import KernelSpec


def kernel(cuda: FakeCuda, arg_format: str = "qif", **fields) -> LoadedKernel:
    values = {"threads": 256, "smem_bytes": 90_000, "min_cc": (9, 0)} | fields
    spec = KernelSpec("some", lambda: None, lambda: (), **values)
    function = LoadedFunction(spec, FUNCTION, arg_format, registers=40, static_smem=0, local_bytes=0)
    return LoadedKernel(Driver(cuda), function)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def test_a_launch_carries_grid_block_memory_stream_and_arguments(cuda):
    some = kernel(cuda)
    some.set_grid(12, 7)
    some.bind(0x7F0011223344, -5, 0.25)
    some.launch(99)
    (launch,) = cuda.launches
    assert (launch.grid, launch.block) == ((12, 7, 1), (256, 1, 1))
    assert (launch.smem, launch.stream, launch.function) == (90_000, 99, FUNCTION)
    assert launch.values("qif") == [0x7F0011223344, -5, 0.25]
    assert launch.attributes == []


def test_the_stream_of_each_launch_is_its_own(cuda):
    some = kernel(cuda)
    some.bind(1, 2, 3.0)
    for stream in (0, 99, 99, 0, 5):
        some.launch(stream)
    assert [launch.stream for launch in cuda.launches] == [0, 99, 99, 0, 5]


def test_clusters_and_early_launch_are_attributes(cuda):
    some = kernel(cuda, cluster=2, pdl=True)
    some.bind(1, 2, 3.0)
    some.launch(0)
    (launch,) = cuda.launches
    (cluster, dimension), (early, allowed) = launch.attributes
    assert (cluster, early) == (
        structs.LAUNCH_CLUSTER_DIMENSION,
        structs.LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION,
    )
    assert struct.unpack_from("3I", dimension) == (2, 1, 1)
    assert struct.unpack_from("i", allowed) == (1,)
    assert launch.grid == (2, 1, 1)


def test_launchers_of_one_function_do_not_share_arguments(cuda):
    first = kernel(cuda)
    second = LoadedKernel(Driver(cuda), first.function)
    first.bind(1, 1, 1.0)
    second.bind(2, 2, 2.0)
    first.launch(0)
    assert cuda.launches[-1].values("qif") == [1, 1, 1.0]


CODES = {
    "b": st.integers(-(2**7), 2**7 - 1),
    "B": st.integers(0, 2**8 - 1),
    "h": st.integers(-(2**15), 2**15 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "I": st.integers(0, 2**32 - 1),
    "q": st.integers(-(2**63), 2**63 - 1),
    "Q": st.integers(0, 2**64 - 1),
    "f": st.floats(width=32, allow_nan=False),
    "d": st.floats(allow_nan=False),
}


@given(st.lists(st.sampled_from(sorted(CODES)), max_size=24).flatmap(
    lambda codes: st.tuples(st.just("".join(codes)), st.tuples(*(CODES[code] for code in codes)))
))  # fmt: skip
def test_any_mix_of_arguments_arrives_as_bound(case):
    arg_format, values = case
    cuda = FakeCuda()
    some = kernel(cuda, arg_format)
    some.bind(*values)
    some.launch(0)
    assert cuda.launches[0].values(arg_format) == list(values)


@pytest.mark.parametrize("values", [(1, 2), (1, 2, 3.0, 4), (1, 2**31, 3.0), (1, 2.5, 3.0), (None, 2, 3.0)])
def test_arguments_that_do_not_fit_are_refused(cuda, values):
    with pytest.raises(TypeError, match="kernel some: arguments .* do not fit the format 'qif'"):
        kernel(cuda).bind(*values)


@pytest.mark.parametrize("grid", [(0, 1), (3, 1), (2, 0), (2, 65_536), (-2, 1)])
def test_an_impossible_grid_is_refused(cuda, grid):
    with pytest.raises(ValueError, match="kernel some: grid is .* multiple of 2"):
        kernel(cuda, cluster=2).set_grid(*grid)


def test_a_refused_launch_names_the_kernel_and_its_grid(cuda):
    some = kernel(cuda)
    some.bind(1, 2, 3.0)
    some.set_grid(8, 2)
    cuda.fail["cuLaunchKernelEx"] = LAUNCH_FAILED
    with pytest.raises(
        CudaError, match=r"launch of kernel some with grid \(8, 2\) failed: CUDA_ERROR_LAUNCH_FAILED"
    ):
        some.launch(0)


def test_a_launch_calls_the_driver_once_and_nothing_else(cuda):
    some = kernel(cuda, cluster=2)
    cuda.calls.clear()
    some.bind(1, 2, 3.0)
    some.launch(5)
    assert cuda.calls == ["cuLaunchKernelEx"]


def test_launches_leave_no_memory_behind(cuda):
    some = kernel(cuda, "q" * 24)
    some._call = lambda *args: 0  # the pretended driver records, which takes memory
    values = tuple(2**40 + i for i in range(24))

    def launch_many():
        for i in range(1000):
            some.bind(*values)
            some.launch(i % 2)

    launch_many()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    launch_many()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 2000
