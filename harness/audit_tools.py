"""The CUDA binary tools, cuobjdump and nvdisasm: where they are, and what they say about a cubin."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError

_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Resources:
    """A kernel's use of a GPU as written in its cubin; sizes in bytes, stack and local a thread."""

    registers: int
    stack: int
    shared: int
    local: int


@dataclass(frozen=True)
class BinaryTools:
    """Paths of the two programs."""

    cuobjdump: str
    nvdisasm: str

    def resources(self, cubin: bytes, entry: str) -> Resources:
        """What kernel `entry` of `cubin` takes of a GPU, with the routines it calls; UsageError if not told.

        A slow path of a division, say, stands in the cubin as a function of its own.
        """
        found = {name: Resources(*map(int, sizes)) for name, *sizes in _USAGE.findall(self._usage(cubin))}
        if entry not in found:
            raise UsageError(f"{self.cuobjdump} -res-usage says nothing of kernel {entry}")
        return Resources(
            registers=max(one.registers for one in found.values()),
            stack=max(one.stack for one in found.values()),
            shared=found[entry].shared,
            local=max(one.local for one in found.values()),
        )

    def _usage(self, cubin: bytes) -> str:
        return _run([self.cuobjdump, "-res-usage"], cubin)

    def sass(self, cubin: bytes) -> str:
        """The machine code of `cubin` as text; UsageError if the tool does not know the architecture."""
        return _run([self.nvdisasm, "-c"], cubin)


def find_tools() -> BinaryTools:
    """The tools of this environment: NVIDIA's packages, then Triton's, then PATH. UsageError if absent."""
    return BinaryTools(_find("cuobjdump"), _find("nvdisasm"))


def _find(name: str) -> str:
    candidates = [*_package_folders("nvidia", "*/bin"), *_package_folders("triton", "backends/nvidia/bin")]
    for folder in candidates:
        if (folder / name).is_file():
            return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise UsageError(
            f"{name} is not installed: `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`, "
            "or put a CUDA toolkit's bin folder on PATH"
        )
    return found


def _package_folders(package: str, pattern: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return [folder for root in roots for folder in sorted(Path(root).glob(pattern))]


def _run(command: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise UsageError(f"{' '.join(command)} failed: {said}")
    return done.stdout
