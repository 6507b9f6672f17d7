"""Known conflicts between versions, and what to do about each."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

PROBLEM, WARNING = "problem", "warning"
CU13 = (13, 0)
TESTED_SGLANG = {"0.5.17": "0.4.5", "0.5.23": "0.4.10"}
"""SGLang releases that the plug-in is tested with, and the sglang-kernel each of them pins."""

Versions = Mapping[str, str | None]


@dataclass(frozen=True)
class Finding:
    """One thing to know: `level` is "problem" or "warning"."""

    level: str
    text: str


@dataclass(frozen=True)
class Machine:
    """What the rules look at: package versions, CUDA version of the driver, and whether a GPU is there."""

    versions: Versions
    driver_cuda: tuple[int, int] | None = None
    has_gpu: bool = False
    python: tuple[int, int] = sys.version_info[:2]

    def at_least(self, package: str, *least: int) -> bool:
        """Whether `package` is installed in version `least` or later."""
        version = self.versions.get(package)
        return version is not None and numbers(version) >= least


def find_conflicts(machine: Machine) -> list[Finding]:
    """Every rule that applies, problems first."""
    findings = [finding for rule in RULES for finding in rule(machine)]
    return sorted(findings, key=lambda finding: finding.level != PROBLEM)


def numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: 2.4.0rc1 -> (2, 4, 0), 2.11.0+cu130 -> (2, 11, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _python(machine: Machine) -> Iterator[Finding]:
    if machine.python not in ((3, 11), (3, 12)):
        yield Finding(
            WARNING, f"Python {machine.python[0]}.{machine.python[1]} is not tested; 3.11 and 3.12 are"
        )


def _numba(machine: Machine) -> Iterator[Finding]:
    for package in ("numba", "numba-cuda"):
        if machine.versions.get(package) is None:
            level = PROBLEM if machine.has_gpu else WARNING
            yield Finding(level, f"{package} is not installed: without it the kernels run on the CPU only")


def _numpy(machine: Machine) -> Iterator[Finding]:
    if machine.at_least("numpy", 2, 5) and machine.versions.get("numba-cuda"):
        yield Finding(
            PROBLEM,
            f"numpy {machine.versions['numpy']}: numba-cuda fails to import with numpy 2.5 and later, "
            "where np.row_stack is gone; install numpy<2.5",
        )


def _torch(machine: Machine) -> Iterator[Finding]:
    version = machine.versions.get("torch")
    if version is None and machine.has_gpu:
        yield Finding(WARNING, "torch is not installed: bench and serving need it, replay does not")
    if version and machine.has_gpu and "+cpu" in version:
        yield Finding(PROBLEM, f"torch {version} is a build without CUDA, though there is a GPU")


def _driver(machine: Machine) -> Iterator[Finding]:
    if machine.driver_cuda and machine.driver_cuda < CU13 and machine.at_least("cuda-bindings", 13):
        major, minor = machine.driver_cuda
        yield Finding(
            PROBLEM,
            f"the driver supports CUDA {major}.{minor}, but cuda-bindings {machine.versions['cuda-bindings']} "
            "needs CUDA 13 (driver 580 or later); update the driver or install numba-cuda[cu12]",
        )


def _sglang(machine: Machine) -> Iterator[Finding]:
    sglang, kernel = machine.versions.get("sglang"), machine.versions.get("sglang-kernel")
    if sglang is None:
        return
    if sglang not in TESTED_SGLANG:
        yield Finding(WARNING, f"sglang {sglang} is not tested; {' and '.join(TESTED_SGLANG)} are")
    elif kernel and kernel != TESTED_SGLANG[sglang]:
        yield Finding(WARNING, f"sglang {sglang} pins sglang-kernel {TESTED_SGLANG[sglang]}, found {kernel}")
    if sglang == "0.5.17" and machine.at_least("transformers", 5, 17):
        yield Finding(
            PROBLEM,
            f"transformers {machine.versions['transformers']} breaks the import of sglang 0.5.17; "
            "install transformers==5.12.1",
        )


RULES: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _python,
    _numba,
    _numpy,
    _torch,
    _driver,
    _sglang,
)
