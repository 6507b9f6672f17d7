"""A libcuda in Python behind real C function pointers, so that calls go through ctypes as with the driver."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verify_numba.gpu import structs

SUCCESS, INVALID_VALUE, NOT_INITIALIZED, NO_DEVICE, LAUNCH_FAILED = 0, 1, 3, 100, 719
NAMES = {
    INVALID_VALUE: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    LAUNCH_FAILED: (b"CUDA_ERROR_LAUNCH_FAILED", b"unspecified launch failure"),
    NOT_INITIALIZED: (b"CUDA_ERROR_NOT_INITIALIZED", b"initialization error"),
}
FUNCTION = 0xF00
ATTRIBUTES = {16: 132, 38: 50 << 20, 75: 9, 76: 0, 81: 233_472, 97: 232_448}
FUNCTION_ATTRIBUTES = {1: 0, 3: 0, 4: 40}


@dataclass
class Launch:
    """One recorded launch."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    stream: int
    attributes: list[tuple[int, bytes]]
    function: int
    arguments: int

    def values(self, arg_format: str) -> list[Any]:
        """The arguments as the driver would read them: one pointer each."""
        pointers = ctypes.cast(self.arguments, ctypes.POINTER(ctypes.c_void_p))
        read = []
        for index, code in enumerate(arg_format):
            data = ctypes.string_at(pointers[index], struct.calcsize(code))
            read.extend(struct.unpack(code, data))
        return read


@dataclass
class FakeCuda:
    """State of the pretended driver; `fail` maps a function's name to the code it returns."""

    devices: int = 2
    smem_block: int = 101_376
    cc: tuple[int, int] = (9, 0)
    current: int = 0
    capturing: set[int] = field(default_factory=set)
    fail: dict[str, int] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()
    calls: list[str] = field(default_factory=list)
    loaded: list[bytes] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    retained: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.attributes = ATTRIBUTES | {75: self.cc[0], 76: self.cc[1], 97: self.smem_block}
        self._texts = {code: tuple(map(ctypes.c_char_p, names)) for code, names in NAMES.items()}
        for name, argtypes in (structs.PROTOTYPES | structs.OPTIONAL).items():
            if name not in self.lacks:
                setattr(self, name, self._pointer(name, argtypes))

    def _pointer(self, name: str, argtypes: tuple[Any, ...]) -> Any:
        """A C function pointer to `_name`; a string argument arrives as its address."""
        body: Callable[..., int | None] = getattr(self, "_" + name, lambda *args: None)

        def called(*args: Any) -> int:
            self.calls.append(name)
            return self.fail.get(name) or body(*args) or SUCCESS

        received = [ctypes.c_void_p if t is ctypes.c_char_p else t for t in argtypes]
        return ctypes.CFUNCTYPE(ctypes.c_int, *received)(called)

    def _text(self, code, out, which):
        if code not in self._texts:
            return INVALID_VALUE
        out[0] = self._texts[code][which]
        return SUCCESS

    def _cuGetErrorName(self, code, out):
        return self._text(code, out, 0)

    def _cuGetErrorString(self, code, out):
        return self._text(code, out, 1)

    def _cuDriverGetVersion(self, out):
        out[0] = 12040

    def _cuDeviceGetCount(self, out):
        out[0] = self.devices

    def _cuDeviceGet(self, out, ordinal):
        out[0] = ordinal

    def _cuDeviceGetName(self, address, length, device):
        ctypes.memmove(address, b"Fake GPU\0", 9)

    def _cuDeviceGetAttribute(self, out, attribute, device):
        out[0] = self.attributes[attribute]

    def _cuDevicePrimaryCtxRetain(self, out, device):
        self.retained[device] = self.retained.get(device, 0) + 1
        out[0] = 1000 + device

    def _cuCtxGetCurrent(self, out):
        out[0] = self.current

    def _cuCtxGetDevice(self, out):
        out[0] = self.current % 1000

    def _cuCtxSetCurrent(self, context):
        self.current = context or 0

    def _cuModuleLoadData(self, out, image):
        size = int.from_bytes(
            ctypes.string_at(image + 40, 8), "little"
        )  # of the ELF: its section headers' place
        self.loaded.append(ctypes.string_at(image, size))
        out[0] = 0xA00 + len(self.loaded)

    def _cuModuleGetFunction(self, out, module, name):
        out[0] = FUNCTION + module

    def _cuFuncGetAttribute(self, out, attribute, function):
        out[0] = FUNCTION_ATTRIBUTES[attribute]

    def _cuFuncSetAttribute(self, function, attribute, value):
        assert attribute == structs.FUNC_MAX_DYNAMIC_SHARED_BYTES
        return INVALID_VALUE if value > self.smem_block else SUCCESS

    def _cuStreamIsCapturing(self, stream, out):
        if self.capturing and not stream:
            return structs.ERROR_STREAM_CAPTURE_IMPLICIT
        out[0] = stream in self.capturing

    def _cuLaunchKernelEx(self, config_at, function, arguments, extra):
        assert extra is None
        config = structs.LaunchConfig.from_address(config_at)
        attributes = [(a.id, bytes(a.value)) for a in (config.attrs[i] for i in range(config.numAttrs))]
        self.launches.append(
            Launch(
                (config.gridDimX, config.gridDimY, config.gridDimZ),
                (config.blockDimX, config.blockDimY, config.blockDimZ),
                config.sharedMemBytes,
                config.hStream or 0,
                attributes,
                function,
                arguments,
            )
        )
