"""The CUDA driver interface through ctypes: no cost at import, every return code checked."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verify_numba.gpu import structs
from verify_numba.gpu.spec import ComputeCapability


class CudaUnavailable(RuntimeError):
    """This machine or process cannot use a GPU; the message says what is missing."""


class CudaError(RuntimeError):
    """A driver call that failed: `call`, `code`, and the CUDA name and text of the error."""

    def __init__(self, call: str, code: int, name: str, text: str):
        super().__init__(f"{call} failed: {name} ({code}): {text}")
        self.call = call
        self.code = code
        self.name = name


@dataclass(frozen=True)
class GpuInfo:
    """What a plan asks of a GPU. Sizes in bytes; `smem_block` is the most shared memory a block may have."""

    ordinal: int
    name: str
    cc: ComputeCapability
    sm_count: int
    smem_block: int
    smem_sm: int
    l2_bytes: int


class Driver:
    """The functions of libcuda used here, with their argument types set and their results checked.

    `lib` has the exported functions as attributes: libcuda itself, or another implementation of them.
    """

    def __init__(self, lib: Any):
        self.lib = lib
        self._primary: dict[int, int] = {}
        self._guard = threading.Lock()
        for name, argtypes in structs.PROTOTYPES.items():
            if not self._declare(name, argtypes):
                raise CudaUnavailable(f"libcuda has no {name}: the NVIDIA driver is older than CUDA 12.0")
        self._has_func_load = self._declare("cuFuncLoad", structs.OPTIONAL["cuFuncLoad"])
        code = lib.cuInit(0)
        if code == structs.ERROR_NO_DEVICE:
            raise CudaUnavailable("the NVIDIA driver sees no GPU (cuInit: CUDA_ERROR_NO_DEVICE)")
        if code:
            raise CudaUnavailable(f"the NVIDIA driver does not start: {self.error('cuInit', code)}")

    def _declare(self, name: str, argtypes: tuple[type, ...]) -> bool:
        """Set the types of an exported function; False where this driver does not have it."""
        function = getattr(self.lib, name, None)
        if function is None:
            return False
        function.argtypes = argtypes
        function.restype = ctypes.c_int
        return True

    def call(self, name: str, *args: Any) -> None:
        """Call `name`; CudaError unless it succeeds."""
        code = getattr(self.lib, name)(*args)
        if code:
            raise self.error(name, code)

    def error(self, call: str, code: int) -> CudaError:
        name = self._describe("cuGetErrorName", code)
        return CudaError(call, code, name, self._describe("cuGetErrorString", code))

    def _describe(self, function: str, code: int) -> str:
        text = ctypes.c_char_p()
        getattr(self.lib, function)(code, ctypes.byref(text))
        return text.value.decode() if text.value else "unknown error"

    def _int(self, name: str, *args: Any) -> int:
        """The int that `name` writes to its first argument."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *args)
        return value.value

    def _handle(self, name: str, *args: Any) -> int:
        """The handle that `name` writes to its first argument; 0 for none."""
        value = ctypes.c_void_p()
        self.call(name, ctypes.byref(value), *args)
        return value.value or 0

    def cuda_version(self) -> tuple[int, int]:
        """The newest CUDA version that this driver supports."""
        version = self._int("cuDriverGetVersion")
        return version // 1000, version % 1000 // 10

    def device_count(self) -> int:
        return self._int("cuDeviceGetCount")

    def device_properties(self, ordinal: int) -> GpuInfo:
        """Properties of GPU `ordinal`; CudaUnavailable where there is no such GPU."""
        if not 0 <= ordinal < self.device_count():
            raise CudaUnavailable(f"there is no GPU {ordinal}: the driver sees {self.device_count()}")
        device = self._int("cuDeviceGet", ordinal)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), device)

        def attribute(number: int) -> int:
            return self._int("cuDeviceGetAttribute", number, device)

        return GpuInfo(
            ordinal=ordinal,
            name=name.value.decode(),
            cc=(attribute(structs.DEVICE_CC_MAJOR), attribute(structs.DEVICE_CC_MINOR)),
            sm_count=attribute(structs.DEVICE_SM_COUNT),
            smem_block=attribute(structs.DEVICE_SHARED_BYTES_OPTIN),
            smem_sm=attribute(structs.DEVICE_SHARED_BYTES_PER_SM),
            l2_bytes=attribute(structs.DEVICE_L2_BYTES),
        )

    @contextmanager
    def context(self, ordinal: int) -> Iterator[int]:
        """Inside, a context of GPU `ordinal` is current for this thread; yields its handle.

        A current context of that GPU is used as it is (torch's is the primary one). Otherwise the primary
        context becomes current; a context of another GPU is put back at the end.
        """
        before = self._handle("cuCtxGetCurrent")
        device = self._int("cuDeviceGet", ordinal)
        if before and self._int("cuCtxGetDevice") == device:
            yield before
            return
        primary = self._retain_primary(device)
        self.call("cuCtxSetCurrent", primary)
        try:
            yield primary
        finally:
            if before:
                self.call("cuCtxSetCurrent", before)

    def _retain_primary(self, device: int) -> int:
        """The primary context, retained once and for the life of the process."""
        with self._guard:
            if device not in self._primary:
                self._primary[device] = self._handle("cuDevicePrimaryCtxRetain", device)
            return self._primary[device]

    def load_function(self, cubin: bytes, entry: str) -> int:
        """Load a cubin into the current context; the handle of its kernel, kept for the life of the context.

        The code is on the GPU afterwards: nothing is left for the first launch, which may be in a capture.
        """
        module = self._handle("cuModuleLoadData", cubin)
        function = self._handle("cuModuleGetFunction", module, entry.encode())
        if self._has_func_load:
            self.call("cuFuncLoad", function)
        return function

    def function_attribute(self, function: int, attribute: int) -> int:
        return self._int("cuFuncGetAttribute", attribute, function)

    def allow_dynamic_shared(self, function: int, smem_bytes: int) -> None:
        """Let a kernel be launched with `smem_bytes` of dynamic shared memory; the default ends at 48 KiB."""
        self.call("cuFuncSetAttribute", function, structs.FUNC_MAX_DYNAMIC_SHARED_BYTES, smem_bytes)

    def stream_is_capturing(self, stream: int) -> bool:
        """Whether work on `stream` now would land in a CUDA graph (or break a capture under way)."""
        status = ctypes.c_int()
        code = self.lib.cuStreamIsCapturing(stream, ctypes.byref(status))
        if code == structs.ERROR_STREAM_CAPTURE_IMPLICIT:
            return True
        if code:
            raise self.error("cuStreamIsCapturing", code)
        return status.value != 0

    def launcher(self) -> Callable[..., int]:
        """The raw launch function (config, function, arguments, extra) -> CUresult, for the hot path."""
        return self.lib.cuLaunchKernelEx


@functools.cache
def get_driver() -> Driver:
    """The driver of this machine; CudaUnavailable where there is none."""
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaUnavailable(f"no NVIDIA driver on this machine: {error}") from error
    return Driver(lib)
