"""The driver layer against a pretended libcuda: checked results, contexts, properties, unavailability."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
from fake_cuda import LAUNCH_FAILED, NO_DEVICE, NOT_INITIALIZED, FakeCuda

from verify_numba.gpu import driver as driver_module
from verify_numba.gpu import structs
from verify_numba.gpu.driver import CudaError, CudaUnavailable, Driver, GpuInfo, get_driver


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def driver(cuda) -> Driver:
    return Driver(cuda)


def test_a_failed_call_names_call_code_and_text(cuda, driver):
    cuda.fail["cuModuleLoadData"] = LAUNCH_FAILED
    with pytest.raises(CudaError) as caught:
        driver.load_function(b"\x7fELF", "_Z")
    assert str(caught.value) == (
        "cuModuleLoadData failed: CUDA_ERROR_LAUNCH_FAILED (719): unspecified launch failure"
    )
    assert (caught.value.call, caught.value.code) == ("cuModuleLoadData", 719)


def test_a_code_without_a_name_is_still_reported(cuda, driver):
    cuda.fail["cuModuleLoadData"] = 4242
    with pytest.raises(CudaError, match=r"unknown error \(4242\)"):
        driver.load_function(b"\x7fELF", "_Z")


@pytest.mark.parametrize(
    ("code", "reason"), [(NO_DEVICE, "sees no GPU"), (NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED")]
)
def test_a_driver_that_does_not_start_is_unavailable(code, reason):
    with pytest.raises(CudaUnavailable, match=reason):
        Driver(FakeCuda(fail={"cuInit": code}))


def test_a_driver_without_a_needed_function_is_too_old():
    with pytest.raises(CudaUnavailable, match=r"no cuLaunchKernelEx.*older than CUDA 12\.0"):
        Driver(FakeCuda(lacks=frozenset({"cuLaunchKernelEx"})))


def test_a_machine_without_libcuda_says_so(monkeypatch):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver_module.ctypes, "CDLL", absent)
    get_driver.cache_clear()
    with pytest.raises(CudaUnavailable, match="no NVIDIA driver on this machine.*libcuda"):
        get_driver()
    get_driver.cache_clear()


def test_properties_of_a_gpu(driver):
    assert driver.device_properties(1) == GpuInfo(
        ordinal=1,
        name="Fake GPU",
        cc=(9, 0),
        sm_count=132,
        smem_block=101_376,
        smem_sm=233_472,
        l2_bytes=50 << 20,
    )


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_gpu_that_is_not_there_is_unavailable(driver, ordinal):
    with pytest.raises(CudaUnavailable, match=f"no GPU {ordinal}: the driver sees 2"):
        driver.device_properties(ordinal)


def test_a_current_context_of_the_gpu_is_used_as_it_is(cuda, driver):
    cuda.current = 1001
    with driver.context(1) as context:
        assert context == cuda.current == 1001
    assert cuda.retained == {}


def test_without_a_context_the_primary_one_becomes_current_and_stays(cuda, driver):
    for _ in range(2):
        with driver.context(0) as context:
            assert context == cuda.current == 1000
    assert cuda.current == 1000
    assert cuda.retained == {0: 1}


def test_a_context_of_another_gpu_is_put_back(cuda, driver):
    cuda.current = 1000
    with pytest.raises(RuntimeError, match="inside"), driver.context(1) as context:
        assert context == cuda.current == 1001
        raise RuntimeError("inside")
    assert cuda.current == 1000


def test_capture_is_seen_on_the_stream_and_from_the_default_stream(cuda, driver):
    assert not driver.stream_is_capturing(7)
    cuda.capturing = {7}
    assert driver.stream_is_capturing(7)
    assert not driver.stream_is_capturing(8)
    assert driver.stream_is_capturing(0)


def test_another_error_of_the_capture_query_is_an_error(cuda, driver):
    cuda.fail["cuStreamIsCapturing"] = NOT_INITIALIZED
    with pytest.raises(CudaError, match="cuStreamIsCapturing"):
        driver.stream_is_capturing(7)


def test_functions_are_loaded_before_their_first_launch_where_the_driver_can(cuda, driver):
    elf = b"\x7fELF".ljust(64, b"\0")
    driver.load_function(elf, "_Z")
    assert cuda.calls[-1] == "cuFuncLoad"
    old = FakeCuda(lacks=frozenset({"cuFuncLoad"}))
    Driver(old).load_function(elf, "_Z")
    assert old.calls[-1] == "cuModuleGetFunction"


HEADER_PROGRAM = """
#include <cuda.h>
#include <stddef.h>
#include <stdio.h>
int main(void) {
    printf("%zu %zu %zu %zu %zu %zu %zu ", sizeof(CUlaunchAttribute), offsetof(CUlaunchAttribute, value),
           sizeof(CUlaunchConfig), offsetof(CUlaunchConfig, sharedMemBytes),
           offsetof(CUlaunchConfig, hStream), offsetof(CUlaunchConfig, attrs),
           offsetof(CUlaunchConfig, numAttrs));
    printf("%d %d %d %d\\n", CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
           CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
           CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    return 0;
}
"""


def cuda_include() -> str | None:
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    roots.append(Path("/usr/local/cuda"))
    found = [
        path for root in roots for path in (*root.glob("*/include/cuda.h"), *root.glob("include/cuda.h"))
    ]
    return str(found[0].parent) if found else None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="comparing with cuda.h needs a C compiler")
@pytest.mark.skipif(cuda_include() is None, reason="comparing with cuda.h needs the CUDA headers")
def test_the_structures_are_those_of_cuda_h(tmp_path):
    (tmp_path / "layout.c").write_text(HEADER_PROGRAM)
    program = tmp_path / "layout"
    subprocess.run(["gcc", f"-I{cuda_include()}", str(tmp_path / "layout.c"), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
    config = structs.LaunchConfig
    assert list(map(int, said)) == [
        ctypes.sizeof(structs.LaunchAttribute),
        structs.LaunchAttribute.value.offset,
        ctypes.sizeof(config),
        config.sharedMemBytes.offset,
        config.hStream.offset,
        config.attrs.offset,
        config.numAttrs.offset,
        structs.LAUNCH_CLUSTER_DIMENSION,
        structs.LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION,
        structs.FUNC_MAX_DYNAMIC_SHARED_BYTES,
        structs.ERROR_STREAM_CAPTURE_IMPLICIT,
    ]
