"""Everything the doctor found out, as text and as JSON."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from harness.doctor_conflicts import PROBLEM, Finding, Machine, find_conflicts
from harness.doctor_gpu import LEAST_CC, Gpus, can_run, find_gpus, gpu_json
from harness.doctor_libraries import Library, find_libraries
from harness.doctor_serving import Serving, look_at_serving
from harness.fatbin import ComputeCapability
from harness.versions import installed_versions

SCHEMA = "verify-numba-doctor/1"
MORE_PACKAGES = (
    "cuda-bindings",
    "sglang-kernel",
    "flashinfer-python",
    "transformers",
    "nvidia-ml-py",
    "matplotlib",
)
TOOLS = ("nvcc", "ninja", "nvidia-smi", "ncu", "compute-sanitizer")


@dataclass(frozen=True)
class Diagnosis:
    """`targets` are the compute capabilities that libraries are judged for."""

    gpus: Gpus
    versions: dict[str, str | None]
    findings: list[Finding]
    libraries: list[Library]
    without_kernels: dict[str, str]
    targets: Sequence[ComputeCapability]
    serving: Serving

    @property
    def has_problem(self) -> bool:
        return any(finding.level == PROBLEM for finding in self.findings)

    def text(self) -> str:
        tools = [f"{tool:18s} {shutil.which(tool) or '-'}" for tool in TOOLS]
        versions = [f"{name:18s} {version or '-'}" for name, version in self.versions.items()]
        findings = [f"{f.level}: {f.text}" for f in self.findings] or ["nothing in the way"]
        if not self.gpus.found:
            findings.append("no GPU: the kernels run on the CPU")
        sections = {
            "GPU": _gpu_lines(self.gpus),
            "versions": versions,
            "tools": tools,
            "kernels in installed libraries": self._library_lines(),
            "SGLang": self.serving.lines(),
            "findings": findings,
        }
        return "\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "driver": self.gpus.driver,
            "driver_cuda": self.gpus.driver_cuda,
            "gpus": [gpu_json(gpu) for gpu in self.gpus.found],
            "no_gpu": self.gpus.reason or None,
            "versions": self.versions,
            "tools": {tool: shutil.which(tool) for tool in TOOLS},
            "libraries": [library.as_json(self.targets) for library in self.libraries],
            "packages_without_kernels": self.without_kernels,
            "serving": self.serving.as_json(),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def _library_lines(self) -> list[str]:
        lines = []
        for library in self.libraries:
            code = ", ".join(library.targets(ptx=False)) or "none"
            ptx = ", ".join(library.targets(ptx=True)) or "none"
            verdicts = "".join(f"; on {cc[0]}.{cc[1]}: {library.verdict(cc)}" for cc in self.targets)
            lines.append(f"{library.package}: {library.file}: code {code}; PTX {ptx}{verdicts}")
        return lines + [f"{package}: {reason}" for package, reason in self.without_kernels.items()]


def diagnose(asked: ComputeCapability | None = None) -> Diagnosis:
    """Look at everything; `asked` is a compute capability to judge libraries for instead of the GPUs here."""
    gpus, serving = find_gpus(), look_at_serving()
    versions = installed_versions() | {package: _version(package) for package in MORE_PACKAGES}
    findings = find_conflicts(Machine(versions, gpus.driver_cuda, bool(gpus.found)))
    findings += [
        Finding(PROBLEM, f"{gpu.name}: {line}")
        for gpu in gpus.found
        if gpu.cc < LEAST_CC
        for line in can_run(gpu)
    ]
    if serving.settings_error:
        findings.append(Finding(PROBLEM, serving.settings_error))
    libraries, without_kernels = find_libraries()
    targets = [asked] if asked else sorted({gpu.cc for gpu in gpus.found})
    return Diagnosis(gpus, versions, findings, libraries, without_kernels, targets, serving)


def _gpu_lines(gpus: Gpus) -> list[str]:
    if not gpus.found:
        return [
            f"none: {gpus.reason}",
            "the kernels run on the CPU here: replay and tests work, bench does not",
        ]
    cuda = "unknown" if gpus.driver_cuda is None else f"{gpus.driver_cuda[0]}.{gpus.driver_cuda[1]}"
    lines = [f"driver {gpus.driver or 'unknown'}, CUDA up to {cuda}"]
    for gpu in gpus.found:
        lines.append(
            f"{gpu.ordinal}: {gpu.name}, compute capability {gpu.cc[0]}.{gpu.cc[1]}, {gpu.sm_count} SMs, "
            f"shared memory {gpu.smem_block:,} B a block, L2 {gpu.l2_bytes / 2**20:.0f} MiB"
        )
        lines += [f"   {line}" for line in can_run(gpu)]
    return lines


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
