"""One line of the audit: a variant compiled, assembled and judged for one architecture."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness import audit_scan
from harness.audit_limits import LIMITS, SPILL_FREE_FROM, blocks_per_sm, static_shared
from harness.audit_tools import BinaryTools
from harness.errors import UsageError
from verify_numba.gpu.artifact import Artifact
from verify_numba.gpu.cache import CubinCache
from verify_numba.gpu.compile import CompileError
from verify_numba.gpu.spec import ComputeCapability, KernelSpec, arch

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Job:
    """What a worker process needs: `provider` is `module:function`, the function returns all specs."""

    provider: str
    variant: str
    cc: ComputeCapability
    tools: BinaryTools
    keep: Path | None = None


@dataclass
class Finding:
    """A variant on an architecture. Sizes in bytes; `problems` is empty when it passes."""

    variant: str
    cc: ComputeCapability
    threads: int = 0
    cluster: int = 1
    registers: int = 0
    max_registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    local: int = 0
    static_smem: int = 0
    dynamic_smem: int = 0
    smem_limit: int = 0
    blocks_per_sm: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    forbidden: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def smem(self) -> int:
        return self.static_smem + self.dynamic_smem


def specs_of(provider: str) -> list[KernelSpec]:
    """All specs of `module:function`; UsageError where two share a name or there are none."""
    module, _, function = provider.partition(":")
    load: Callable[[], list[KernelSpec]] = getattr(importlib.import_module(module), function)
    specs = load()
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{provider} lists more than one variant called {', '.join(twice)}")
    if not specs:
        raise UsageError(f"{provider} lists no variant")
    return specs


def audit(job: Job) -> Finding:
    """Compile (or take from the cache), disassemble, judge. A failed compilation is the variant's problem."""
    spec = next(spec for spec in specs_of(job.provider) if spec.name == job.variant)
    finding = Finding(
        spec.name,
        job.cc,
        threads=spec.threads,
        cluster=spec.cluster,
        max_registers=spec.max_registers,
        dynamic_smem=spec.smem_bytes,
        smem_limit=LIMITS[job.cc].smem_block,
    )
    try:
        artifact = CubinCache().get(spec, job.cc)
    except CompileError as error:
        finding.problems.append(str(error))
        return finding
    codes = _measure(finding, artifact, job)
    finding.forbidden = sorted(
        {*audit_scan.forbidden_in_ptx(artifact.ptx), *audit_scan.forbidden_in_sass(codes)}
    )
    finding.problems = problems(finding, spec)
    return finding


def _measure(finding: Finding, artifact: Artifact, job: Job) -> list[str]:
    usage = job.tools.resources(artifact.cubin, artifact.entry)
    sass = job.tools.sass(artifact.cubin)
    codes = audit_scan.opcodes(sass)
    spills = _SPILLS.findall(artifact.log)
    finding.registers = usage.registers
    finding.spill_stores = sum(int(stores) for stores, _ in spills)
    finding.spill_loads = sum(int(loads) for _, loads in spills)
    finding.local = usage.stack + usage.local
    finding.static_smem = static_shared(job.cc, usage.shared)
    finding.blocks_per_sm = blocks_per_sm(job.cc, finding.threads, finding.registers, finding.smem)
    finding.counts = audit_scan.count(codes)
    if job.keep is not None:
        _keep(job.keep / f"{finding.variant}-{arch(job.cc)}", artifact, sass)
    return codes


def _keep(stem: Path, artifact: Artifact, sass: str) -> None:
    stem.with_suffix(".ptx").write_text(artifact.ptx)
    stem.with_suffix(".cubin").write_bytes(artifact.cubin)
    stem.with_suffix(".sass").write_text(sass)


def problems(finding: Finding, spec: KernelSpec) -> list[str]:
    """Every rule that the variant breaks, one sentence each."""
    found = []
    if finding.cc >= SPILL_FREE_FROM:
        if finding.spill_stores or finding.spill_loads:
            found.append(f"spills: {finding.spill_stores} B stored, {finding.spill_loads} B loaded")
        if finding.local or finding.counts["local"]:
            found.append(f"local memory: {finding.local} B a thread, {finding.counts['local']} instructions")
    if finding.registers > spec.max_registers:
        found.append(f"{finding.registers} registers, more than the {spec.max_registers} of its spec")
    if finding.smem > finding.smem_limit:
        found.append(f"{finding.smem:,} B of shared memory, a block has {finding.smem_limit:,} B")
    elif finding.blocks_per_sm < spec.min_blocks:
        found.append(f"{finding.blocks_per_sm} blocks fit on an SM, its spec wants {spec.min_blocks}")
    found.extend(f"forbidden instruction: {kind}" for kind in finding.forbidden)
    return found


def missing(specs: list[KernelSpec], cc: ComputeCapability) -> list[str]:
    """What the variants lack on an architecture: a form without clusters, and from 9.0 on one with."""
    here = [spec for spec in specs if spec.used_on(cc)]
    found = []
    if not any(spec.cluster == 1 for spec in here):
        found.append(f"{arch(cc)}: no variant without clusters")
    if cc >= (9, 0) and not any(spec.cluster > 1 for spec in here):
        found.append(f"{arch(cc)}: no variant with clusters")
    return found
