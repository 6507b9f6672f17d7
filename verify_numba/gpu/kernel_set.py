"""The kernels of one GPU: each variant is compiled and loaded once, and never inside a graph capture."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable

from verify_numba.gpu import structs
from verify_numba.gpu.artifact import Artifact
from verify_numba.gpu.cache import CubinCache
from verify_numba.gpu.cache_key import cache_key
from verify_numba.gpu.driver import CudaError, Driver, GpuInfo, get_driver
from verify_numba.gpu.kernel import LoadedFunction, LoadedKernel
from verify_numba.gpu.spec import KernelSpec, arch


class ColdLaunchError(RuntimeError):
    """A kernel would have to be compiled or loaded while a CUDA graph is being captured."""


class UnsupportedKernel(RuntimeError):
    """A variant that this GPU cannot run; says what it needs and what the GPU has."""


@functools.cache
def process_cache() -> CubinCache:
    """The cache that all users in this process share."""
    return CubinCache()


class KernelSet:
    """Loaded kernels of GPU `ordinal`, kept for the life of the process's context.

    Safe for threads. `driver` and `cache` default to this machine's driver and the process's cache.
    Raises CudaUnavailable where there is no such GPU.
    """

    def __init__(self, ordinal: int, driver: Driver | None = None, cache: CubinCache | None = None):
        self._driver = driver or get_driver()
        self._cache = cache or process_cache()
        self.gpu: GpuInfo = self._driver.device_properties(ordinal)
        self._functions: dict[tuple[int, str], LoadedFunction] = {}
        self._guard = threading.Lock()

    def load(self, spec: KernelSpec, stream: int = 0) -> LoadedKernel:
        """A launcher of `spec`, the caller's own.

        The first call for a variant compiles and loads it; `stream` is the caller's current stream, which
        must not be capturing then. Raises ColdLaunchError, UnsupportedKernel, CompileError or CudaError.
        """
        with self._driver.context(self.gpu.ordinal) as context, self._guard:
            key = (context, cache_key(spec, self.gpu.cc))
            function = self._functions.get(key)
            if function is None:
                self._refuse_capture(spec, stream)
                function = self._functions[key] = self._load(spec)
        return LoadedKernel(self._driver, function)

    def warmup(self, specs: Iterable[KernelSpec], stream: int = 0) -> None:
        """Compile and load all of `specs`; raises as `load` does."""
        for spec in specs:
            self.load(spec, stream)

    def _refuse_capture(self, spec: KernelSpec, stream: int) -> None:
        if self._driver.stream_is_capturing(stream):
            raise ColdLaunchError(
                f"kernel {spec.name} is not loaded yet and a CUDA graph is being captured: loading would "
                "break the capture. Call Verifier.warmup() before capturing."
            )

    def _load(self, spec: KernelSpec) -> LoadedFunction:
        if not spec.used_on(self.gpu.cc):
            to = f"to {arch(spec.max_cc)}" if spec.max_cc else "and later"
            raise UnsupportedKernel(
                f"kernel {spec.name} is for {arch(spec.min_cc)} {to}, {self.gpu.name} is {arch(self.gpu.cc)}"
            )
        artifact = self._cache.get(spec, self.gpu.cc)
        handle = self._load_function(artifact)
        self._allow_shared(spec, handle)
        return LoadedFunction(
            spec,
            handle,
            artifact.arg_format,
            registers=self._driver.function_attribute(handle, structs.FUNC_REGISTERS),
            static_smem=self._driver.function_attribute(handle, structs.FUNC_STATIC_SHARED_BYTES),
            local_bytes=self._driver.function_attribute(handle, structs.FUNC_LOCAL_BYTES),
        )

    def _load_function(self, artifact: Artifact) -> int:
        try:
            return self._driver.load_function(artifact.cubin, artifact.entry)
        except CudaError as error:
            if error.code not in structs.ERRORS_FOREIGN_CODE:
                raise
            major, minor = self._driver.cuda_version()
            raise UnsupportedKernel(
                f"kernel {artifact.name}: this driver, for CUDA {major}.{minor}, does not take the compiled "
                f"code ({error}). The CUDA packages that made it must have the driver's major version."
            ) from error

    def _allow_shared(self, spec: KernelSpec, handle: int) -> None:
        try:
            self._driver.allow_dynamic_shared(handle, spec.smem_bytes)
        except CudaError as error:
            if error.code != structs.ERROR_INVALID_VALUE:
                raise
            raise UnsupportedKernel(
                f"kernel {spec.name} needs {spec.smem_bytes:,} B of dynamic shared memory a block, "
                f"{self.gpu.name} has {self.gpu.smem_block:,} B"
            ) from error


@functools.cache
def kernel_set(ordinal: int) -> KernelSet:
    """The kernels of GPU `ordinal`, shared by all users in this process."""
    return KernelSet(ordinal)
