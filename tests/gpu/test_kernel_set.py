"""Loading kernels against a pretended libcuda: once a context, never in a capture, refused with a reason."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import toy_kernels
from fake_cuda import LAUNCH_FAILED, FakeCuda

from verify_numba.gpu import cache as cache_module
from verify_numba.gpu.artifact import Artifact
from verify_numba.gpu.cache import CubinCache
from verify_numba.gpu.driver import CudaError, CudaUnavailable, Driver
from verify_numba.gpu.kernel_set import ColdLaunchError, KernelSet, UnsupportedKernel

CUBIN = b"\x7fELF".ljust(40, b"\0") + (96).to_bytes(8, "little") + bytes(range(48))


@pytest.fixture(autouse=True)
def builds(monkeypatch) -> list[tuple[str, tuple[int, int]]]:
    """Stands in for the compiler; one entry a compilation."""
    made: list[tuple[str, tuple[int, int]]] = []

    def build(spec, cc):
        made.append((spec.name, cc))
        return Artifact(spec.name, "_Z", "qif", "", "", CUBIN)

    monkeypatch.setattr(cache_module, "build_artifact", build)
    return made


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def kernels(cuda, tmp_path) -> KernelSet:
    return KernelSet(0, Driver(cuda), CubinCache(tmp_path))


def test_a_variant_is_loaded_once_and_each_user_gets_a_launcher(cuda, kernels, builds):
    first, second = kernels.load(toy_kernels.FILL), kernels.load(toy_kernels.FILL)
    assert first is not second
    assert first.function is second.function
    assert first.function.registers == 40
    assert cuda.loaded == [CUBIN]
    assert builds == [(toy_kernels.FILL.name, (9, 0))]


def test_eight_threads_load_once(cuda, kernels):
    start = threading.Barrier(8)

    def load(_):
        start.wait(timeout=60)
        return kernels.load(toy_kernels.FILL)

    with ThreadPoolExecutor(8) as pool:
        functions = {id(kernel.function) for kernel in pool.map(load, range(8))}
    assert len(functions) == len(cuda.loaded) == 1


def test_another_context_of_the_same_gpu_gets_its_own(cuda, kernels):
    kernels.load(toy_kernels.FILL)
    cuda.current = 5000
    kernels.load(toy_kernels.FILL)
    assert len(cuda.loaded) == 2


def test_a_cold_kernel_is_refused_in_a_capture_before_anything_is_compiled(cuda, kernels, builds):
    cuda.capturing = {7}
    with pytest.raises(ColdLaunchError, match=r"toy-fill is not loaded.*captured.*Verifier\.warmup\(\)"):
        kernels.load(toy_kernels.FILL, stream=7)
    assert builds == []
    assert cuda.loaded == []


def test_a_warm_kernel_is_given_out_in_a_capture(cuda, kernels):
    kernels.warmup([toy_kernels.FILL])
    cuda.capturing = {7}
    assert kernels.load(toy_kernels.FILL, stream=7).spec is toy_kernels.FILL


def test_a_capture_on_another_stream_is_seen_from_the_default_stream(cuda, kernels):
    cuda.capturing = {7}
    with pytest.raises(ColdLaunchError):
        kernels.load(toy_kernels.FILL)


def test_a_variant_for_other_gpus_is_refused(tmp_path):
    ampere = KernelSet(0, Driver(FakeCuda(cc=(8, 6))), CubinCache(tmp_path))
    with pytest.raises(UnsupportedKernel, match="toy-ranks is for sm_90 and later, Fake GPU is sm_86"):
        ampere.load(toy_kernels.RANKS)
    bounded = dataclasses.replace(toy_kernels.RANKS, max_cc=(9, 0))
    blackwell = KernelSet(0, Driver(FakeCuda(cc=(12, 0))), CubinCache(tmp_path))
    with pytest.raises(UnsupportedKernel, match="for sm_90 to sm_90, Fake GPU is sm_120"):
        blackwell.load(bounded)


def test_shared_memory_up_to_the_limit_loads_and_beyond_is_refused_with_both_sizes(kernels):
    kernels.load(toy_kernels.shared_ends(101_376))
    with pytest.raises(UnsupportedKernel, match=r"needs 101,392 B .* has 101,376 B"):
        kernels.load(toy_kernels.shared_ends(101_392))


def test_another_failure_of_that_call_is_not_taken_for_a_lack_of_memory(cuda, kernels):
    cuda.fail["cuFuncSetAttribute"] = LAUNCH_FAILED
    with pytest.raises(CudaError, match="cuFuncSetAttribute failed"):
        kernels.load(toy_kernels.FILL)


def test_code_that_the_driver_is_too_old_for_is_explained(cuda, kernels):
    cuda.fail["cuModuleLoadData"] = 200
    with pytest.raises(UnsupportedKernel, match=r"toy-fill: this driver, for CUDA 12\.4, does not take"):
        kernels.load(toy_kernels.FILL)


def test_a_failed_load_may_be_tried_again(cuda, kernels):
    cuda.fail["cuModuleLoadData"] = LAUNCH_FAILED
    with pytest.raises(CudaError):
        kernels.load(toy_kernels.FILL)
    cuda.fail.clear()
    assert kernels.load(toy_kernels.FILL).function.arg_format == "qif"


def test_a_gpu_that_is_not_there(cuda):
    with pytest.raises(CudaUnavailable, match="no GPU 3"):
        KernelSet(3, Driver(cuda))
