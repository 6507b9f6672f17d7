"""What one kernel variant is, as plain values: readable without numba and without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ComputeCapability = tuple[int, int]
"""Major and minor number of a GPU's compute capability; (12, 0) is sm_120."""

WARP = 32
CLUSTER_MIN_CC: ComputeCapability = (9, 0)
"""Thread block clusters and programmatic launch exist from here on."""


@dataclass(frozen=True)
class KernelSpec:
    """One kernel variant: how to build it, and what a launch of it needs.

    name            unique among all variants; the cache and every message use it
    build           returns the Python kernel function; called only when a compilation is due
    signature       returns the tuple of numba types of the arguments (or `void(...)` of them): integers
                    and floats only, device pointers are passed as int64
    threads         threads a block, a multiple of 32
    smem_bytes      dynamic shared memory a block
    cluster         blocks a cluster in x: 1 (no cluster) or 2
    max_registers   most registers a thread may use; the compiler is held to it
    min_blocks      blocks that should fit on an SM at the same time
    min_cc, max_cc  the range of compute capabilities it is used on (max_cc None: no upper end)
    pdl             launch with programmatic stream serialization: the kernel may start before its
                    predecessor in the stream has ended and waits itself (`griddepcontrol.wait`)

    Raises ValueError, naming the field, where the values cannot make a kernel.
    """

    name: str
    build: Callable[[], Callable[..., Any]]
    signature: Callable[[], Any]
    threads: int
    smem_bytes: int
    cluster: int = 1
    max_registers: int = 255
    min_blocks: int = 1
    min_cc: ComputeCapability = (8, 0)
    max_cc: ComputeCapability | None = None
    pdl: bool = False

    def __post_init__(self) -> None:
        self._require(
            "threads",
            self.threads % WARP == 0 and 0 < self.threads <= 1024,
            "a multiple of 32 between 32 and 1024",
        )
        self._require("smem_bytes", self.smem_bytes >= 0, "at least 0")
        self._require("cluster", self.cluster in (1, 2), "1 or 2")
        self._require("max_registers", 16 <= self.max_registers <= 255, "between 16 and 255")
        self._require("min_blocks", self.min_blocks >= 1, "at least 1")
        if self.cluster > 1 or self.pdl:
            self._require(
                "min_cc",
                self.min_cc >= CLUSTER_MIN_CC,
                "at least (9, 0), where clusters and programmatic launch begin",
            )
        if self.max_cc is not None:
            self._require("max_cc", self.max_cc >= self.min_cc, f"at least min_cc {self.min_cc}")

    def _require(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"kernel {self.name}: {field} is {getattr(self, field)}, expected {expected}")

    def used_on(self, cc: ComputeCapability) -> bool:
        """Whether this variant is meant for GPUs of compute capability `cc`."""
        return self.min_cc <= cc and (self.max_cc is None or cc <= self.max_cc)


def arch(cc: ComputeCapability) -> str:
    """The name of an architecture as the CUDA tools write it: (12, 0) -> sm_120."""
    return f"sm_{cc[0]}{cc[1]}"
