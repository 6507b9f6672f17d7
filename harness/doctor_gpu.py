"""The GPUs of this machine and what the kernels can use of them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verify_numba.geometry import CLUSTER_FORMS, SINGLE_FORMS, Geometry
from verify_numba.gpu.driver import CudaUnavailable, Driver, GpuInfo, get_driver
from verify_numba.variants import verify_spec

LEAST_CC = (8, 0)
"""mma.sync on bf16 and cp.async exist from here on."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpus:
    """`reason` says why `found` is empty; versions are None where there is no driver."""

    found: list[GpuInfo]
    reason: str = ""
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None


def find_gpus() -> Gpus:
    """Ask the CUDA driver; never raises."""
    try:
        driver = get_driver()
        found = [driver.device_properties(ordinal) for ordinal in range(driver.device_count())]
    except CudaUnavailable as error:
        return Gpus([], str(error), driver_version())
    return Gpus(found, "" if found else "the driver sees no GPU", driver_version(), _cuda_version(driver))


def can_run(gpu: GpuInfo) -> list[str]:
    """What of the kernels this GPU can run, and why not the rest."""
    cc = f"{gpu.cc[0]}.{gpu.cc[1]}"
    if gpu.cc < LEAST_CC:
        return [f"no kernel: compute capability {cc}, at least 8.0 is needed (bf16 mma.sync, cp.async)"]
    return [_form(gpu, "form without clusters", SINGLE_FORMS), _form(gpu, "cluster form", CLUSTER_FORMS)]


def _form(gpu: GpuInfo, name: str, forms: Sequence[Geometry]) -> str:
    specs = [verify_spec(geometry) for geometry in forms]
    least = max(spec.min_cc for spec in specs)
    if gpu.cc < least:
        return f"kernels in the {name}: no, compute capability {least[0]}.{least[1]} is needed"
    fitting = [spec for spec in specs if spec.smem_bytes <= gpu.smem_block]
    answer = "yes" if len(fitting) == len(specs) else f"{len(fitting)} of {len(specs)} variants"
    return f"kernels in the {name}: {answer}, they take up to {max(s.smem_bytes for s in specs):,} B a block"


def gpu_json(gpu: GpuInfo) -> dict[str, Any]:
    return {**asdict(gpu), "cc": f"{gpu.cc[0]}.{gpu.cc[1]}", "can_run": can_run(gpu)}


def driver_version(file: Path = DRIVER_FILE) -> str | None:
    """Version of the loaded kernel module, such as 580.65.06."""
    try:
        text = file.read_text()
    except OSError:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match.group(1) if match else None


def _cuda_version(driver: Driver) -> tuple[int, int]:
    """Newest CUDA version that the driver supports."""
    version = ctypes.c_int()
    driver.call("cuDriverGetVersion", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10
