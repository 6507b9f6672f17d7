"""Which GPUs the code in a library is for, read from the headers of its embedded CUDA fat binaries.

nvcc packs each translation unit into one container (magic 0xBA55ED50) with an entry for each target: SASS, which
runs on one generation of GPUs, or PTX, which the driver can compile for later ones. Targets with the suffix `a`
run on exactly their compute capability, those with `f` within its generation. Only headers are read, so that a
library of a gigabyte takes about as long as reading it from disk.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes behind the header
ENTRY = struct.Struct("<HHIQ12xI8xQ")  # kind, version, header bytes, payload bytes, target, flags
PTX, SASS = 1, 2
EXACT_FLAG, FAMILY_FLAG = 0x100000, 0x200000

ComputeCapability = tuple[int, int]


@dataclass(frozen=True, order=True)
class Target:
    """A target of nvcc: `cc`, and the suffix "", "a" or "f"; `ptx` is False for SASS."""

    cc: ComputeCapability
    suffix: str
    ptx: bool

    def runs_on(self, gpu: ComputeCapability) -> bool:
        """Whether a GPU of compute capability `gpu` can run this code, after compilation where it is PTX."""
        if self.suffix == "a":
            return gpu == self.cc
        if self.suffix == "f" or not self.ptx:
            return gpu[0] == self.cc[0] and gpu[1] >= self.cc[1]
        return gpu >= self.cc

    def __str__(self) -> str:
        return f"{self.cc[0]}.{self.cc[1]}{self.suffix}"


Module = frozenset[Target]
"""The targets of one container: one translation unit, compiled for each of them."""


def read_modules(path: Path) -> list[Module]:
    """The containers of a library, those without any code left out. Raises OSError where it cannot be read."""
    if path.stat().st_size == 0:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        modules = [frozenset(_entries(data, start, end)) for start, end in _containers(data)]
    return [module for module in modules if module]


def _containers(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Where the entries of each container start and end."""
    at = data.find(MAGIC)
    while at >= 0 and at + CONTAINER.size <= len(data):
        _, version, header, size = CONTAINER.unpack_from(data, at)
        end = at + header + size
        if version == 1 and header == CONTAINER.size and end <= len(data):
            yield at + header, end
            at = data.find(MAGIC, end)
        else:  # the same four bytes by chance
            at = data.find(MAGIC, at + 1)


def _entries(data: mmap.mmap, at: int, end: int) -> Iterator[Target]:
    while at + ENTRY.size <= end:
        kind, _, header, payload, target, flags = ENTRY.unpack_from(data, at)
        if header < ENTRY.size:
            return
        if kind in (PTX, SASS):
            suffix = "a" if flags & EXACT_FLAG else "f" if flags & FAMILY_FLAG else ""
            yield Target(divmod(target, 10), suffix, kind == PTX)
        at += header + payload
