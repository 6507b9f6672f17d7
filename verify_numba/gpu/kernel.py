"""A loaded kernel: packed arguments and a prebuilt launch configuration, so that a launch costs little."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from verify_numba.gpu import structs
from verify_numba.gpu.driver import Driver
from verify_numba.gpu.spec import KernelSpec


@dataclass(frozen=True)
class LoadedFunction:
    """A kernel in a context: shared by all its launchers. `handle` is the CUfunction."""

    spec: KernelSpec
    handle: int
    arg_format: str
    registers: int
    static_smem: int
    local_bytes: int


class LoadedKernel:
    """One user's launcher of a loaded kernel: `bind` the arguments, `launch` on a stream.

    Both allocate nothing, on the host or on the device, and never synchronise, so both may run while the
    stream is captured into a graph: a graph keeps the values bound at the time of its capture.
    Not for two threads at once: each takes a launcher of its own. The context that the kernel was
    loaded in must be current (torch: the kernel's device must be the current one).
    """

    def __init__(self, driver: Driver, function: LoadedFunction):
        self.function = function
        self.spec = function.spec
        self._driver = driver
        self._call = driver.launcher()
        self._handle = ctypes.c_void_p(function.handle)
        self._pack_arguments(function.arg_format)
        self._attributes = _attributes(function.spec)
        self._config = structs.LaunchConfig(
            gridDimX=function.spec.cluster, gridDimY=1, gridDimZ=1,
            blockDimX=function.spec.threads, blockDimY=1, blockDimZ=1,
            sharedMemBytes=function.spec.smem_bytes,
            attrs=self._attributes,
            numAttrs=len(self._attributes),
        )  # fmt: skip
        self._config_at = ctypes.c_void_p(ctypes.addressof(self._config))
        self._stream = 0

    def _pack_arguments(self, arg_format: str) -> None:
        """Storage for the arguments, 8-byte aligned, and the array of their addresses."""
        ends = [struct.calcsize("@" + arg_format[: i + 1]) for i in range(len(arg_format))]
        offsets = [end - struct.calcsize(code) for end, code in zip(ends, arg_format, strict=True)]
        size = ends[-1] if ends else 0
        self._storage = (ctypes.c_uint64 * max(1, -(-size // 8)))()
        base = ctypes.addressof(self._storage)
        self._addresses = (ctypes.c_void_p * max(1, len(offsets)))(*(base + offset for offset in offsets))
        self._arguments = ctypes.c_void_p(ctypes.addressof(self._addresses))
        self._pack_into = struct.Struct("@" + arg_format).pack_into

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks in x and y."""
        return self._config.gridDimX, self._config.gridDimY

    def set_grid(self, x: int, y: int = 1) -> None:
        """Blocks in x (a multiple of the cluster size) and y of the next launches; ValueError otherwise."""
        if x < 1 or x % self.spec.cluster or not 1 <= y <= 65535:
            raise ValueError(
                f"kernel {self.spec.name}: grid is ({x}, {y}), expected x a positive multiple of "
                f"{self.spec.cluster} and y between 1 and 65535"
            )
        self._config.gridDimX = x
        self._config.gridDimY = y

    def bind(self, *values: float) -> None:
        """Set all arguments, in the signature's order; TypeError where count, kind or range do not fit."""
        try:
            self._pack_into(self._storage, 0, *values)
        except struct.error as error:
            raise TypeError(
                f"kernel {self.spec.name}: arguments {values} do not fit the format "
                f"{self.function.arg_format!r}: {error}"
            ) from error

    def launch(self, stream: int) -> None:
        """Launch on the stream with this handle (0: the default stream); CudaError where it is refused."""
        if stream != self._stream:
            self._config.hStream = stream
            self._stream = stream
        code = self._call(self._config_at, self._handle, self._arguments, None)
        if code:
            raise self._driver.error(f"launch of kernel {self.spec.name} with grid {self.grid}", code)


def _attributes(spec: KernelSpec) -> ctypes.Array[structs.LaunchAttribute]:
    chosen = []
    if spec.cluster > 1:
        cluster = structs.LaunchAttribute(id=structs.LAUNCH_CLUSTER_DIMENSION)
        cluster.value.clusterDim.x = spec.cluster
        cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
        chosen.append(cluster)
    if spec.pdl:
        early = structs.LaunchAttribute(id=structs.LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION)
        early.value.programmaticStreamSerializationAllowed = 1
        chosen.append(early)
    return (structs.LaunchAttribute * len(chosen))(*chosen)
