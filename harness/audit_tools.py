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

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


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

    def resources(self, cubin: bytes) -> Resources:
        """What the one kernel in `cubin` takes of a GPU; UsageError where the tool cannot read it."""
        found = _USAGE.findall(_run([self.cuobjdump, "-res-usage"], cubin))
        if len(found) != 1:
            raise UsageError(f"{self.cuobjdump} -res-usage described {len(found)} kernels, expected 1")
        return Resources(*map(int, found[0]))

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
