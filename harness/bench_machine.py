"""What a result was measured on: GPU, driver, clocks, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from harness.versions import installed_versions

SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "temperature.gpu",
)
SMI_TIMEOUT_S = 20
COMMIT_VARIABLE = "VERIFY_NUMBA_COMMIT"


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Machine as a JSON-ready dictionary; GPU fields only where `device` is one."""
    machine: dict[str, Any] = {"platform": platform.platform(), "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            **_from_smi(device.index or 0),
        }
    return machine


def describe_versions() -> dict[str, str | None]:
    versions = installed_versions()
    extra = {"torch": torch.__version__}
    return {**versions, **extra}


def find_commit() -> str | None:
    """Commit of this checkout, with `+changes` where files differ from it.

    A copy without its history knows no commit: there it is what COMMIT_VARIABLE says, or None.
    """
    named = os.environ.get(COMMIT_VARIABLE)
    if named:
        return named
    folder = Path(__file__).parent
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        return None
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}+changes" if changed else commit


def describe_here() -> dict[str, Any]:
    """Commit, machine (its first GPU, if it has one) and versions, for results of commands that name no device."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return {"commit": find_commit(), "machine": describe_machine(device), "versions": describe_versions()}


def _from_smi(index: int) -> dict[str, str]:
    text = _output(
        [
            "nvidia-smi",
            "-i",
            str(index),
            f"--query-gpu={','.join(SMI_FIELDS)}",
            "--format=csv,noheader",
        ]
    )
    values = [value.strip() for value in (text or "").split(",")]
    return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else {}


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
