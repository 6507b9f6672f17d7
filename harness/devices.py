"""Where a replay runs: NumPy arrays in host memory, or torch tensors on a GPU."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from harness.errors import UsageError

DEVICES = ("auto", "gpu", "cpu")


class Device(Protocol):
    """Moves arrays to where the kernels read them and back, and times one call there."""

    @property
    def name(self) -> str:
        """As `Verifier(device=...)` takes it."""

    def describe(self) -> dict[str, Any]:
        """What a report says about the device."""

    def put(self, array: NDArray) -> Any:
        """A copy on the device (on the CPU the array itself); bf16 stays bf16 bit for bit."""

    def poisoned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array full of NaN; `dtype` is bfloat16 or float32."""

    def get(self, array: Any) -> NDArray:
        """Back to NumPy."""

    def timed(self, call: Callable[[], None]) -> float:
        """Run `call`, wait for it and return its seconds."""


@dataclass(frozen=True)
class HostDevice:
    """The kernels' source run on the CPU."""

    name: str = "cpu"

    def describe(self) -> dict[str, Any]:
        return {"kind": "cpu", "name": f"CPU ({platform.machine()})", "cores": os.cpu_count()}

    def put(self, array: NDArray) -> NDArray:
        return array

    def poisoned(self, shape: tuple[int, ...], dtype: Any) -> NDArray:
        return np.full(shape, np.nan, dtype)

    def get(self, array: NDArray) -> NDArray:
        return array

    def timed(self, call: Callable[[], None]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


class CudaDevice:
    """The current CUDA device of torch."""

    def __init__(self, torch: Any):
        self._torch = torch
        self._index = torch.cuda.current_device()
        self.name = f"cuda:{self._index}"

    def describe(self) -> dict[str, Any]:
        properties = self._torch.cuda.get_device_properties(self._index)
        return {
            "kind": "gpu",
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }

    def put(self, array: NDArray) -> Any:
        plain = np.array(array)  # torch takes neither read-only arrays nor ml_dtypes
        if plain.dtype == bfloat16:
            return self._torch.from_numpy(plain.view(np.int16)).to(self.name).view(self._torch.bfloat16)
        return self._torch.from_numpy(plain).to(self.name)

    def poisoned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        torch_dtype = self._torch.bfloat16 if dtype == bfloat16 else self._torch.float32
        return self._torch.full(shape, float("nan"), dtype=torch_dtype, device=self.name)

    def get(self, array: Any) -> NDArray:
        if array.dtype == self._torch.bfloat16:
            return array.cpu().view(self._torch.int16).numpy().view(bfloat16)
        return array.cpu().numpy()

    def timed(self, call: Callable[[], None]) -> float:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def select_device(wanted: str) -> Device:
    """The device for `--device auto|gpu|cpu`. Raises UsageError where a GPU is asked for and not usable."""
    if wanted == "cpu":
        return HostDevice()
    torch, reason = _cuda_torch()
    if torch is not None:
        return CudaDevice(torch)
    if wanted == "gpu":
        raise UsageError(f"--device gpu: {reason}")
    return HostDevice()


def _cuda_torch() -> tuple[Any, str]:
    try:
        import torch
    except ModuleNotFoundError:
        return None, "PyTorch is not installed; it holds the tensors on the GPU"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return None, "found no usable NVIDIA GPU" + ("" if built else " (this PyTorch is built without CUDA)")
    return torch, ""
