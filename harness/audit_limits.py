"""Limits of the audited architectures, and how many blocks of a kernel fit on an SM.

Figures: CUDA C++ Programming Guide, "Compute Capabilities", technical specifications table.
"""

from __future__ import annotations

from dataclasses import dataclass

from verify_numba.gpu.spec import ComputeCapability

KIB = 1024
WARP = 32
REGISTERS_PER_SM = 65_536
REGISTER_UNIT = 256
"""Registers are given out a warp at a time, in units of this many."""
SHARED_UNIT = 128
SYSTEM_SHARED = 1 * KIB
"""Shared memory that the system keeps in every block, on top of the block's own."""


@dataclass(frozen=True)
class Limits:
    """Of one SM: threads, blocks, shared memory; and the most shared memory a block may have. Bytes."""

    threads: int
    blocks: int
    smem_sm: int
    smem_block: int


LIMITS: dict[ComputeCapability, Limits] = {
    (8, 0): Limits(threads=2048, blocks=32, smem_sm=164 * KIB, smem_block=163 * KIB),
    (8, 6): Limits(threads=1536, blocks=16, smem_sm=100 * KIB, smem_block=99 * KIB),
    (8, 9): Limits(threads=1536, blocks=24, smem_sm=100 * KIB, smem_block=99 * KIB),
    (9, 0): Limits(threads=2048, blocks=32, smem_sm=228 * KIB, smem_block=227 * KIB),
    (10, 0): Limits(threads=2048, blocks=32, smem_sm=228 * KIB, smem_block=227 * KIB),
    (12, 0): Limits(threads=1536, blocks=24, smem_sm=100 * KIB, smem_block=99 * KIB),
}
"""The audited architectures. The blocks of (8, 9) and (12, 0) may have 101,376 bytes."""

SPILL_FREE_FROM: ComputeCapability = (9, 0)
"""A spill fails the audit from here on. Before, the assembler calls helper functions around warp-wide instructions
where it cannot prove that a warp is together, and saves registers over those calls: shown, not a failure."""

CUBIN_COUNTS_SYSTEM_SHARED: ComputeCapability = (9, 0)
"""From here on the shared memory written in a cubin includes the system's part, if the kernel uses any."""


def static_shared(cc: ComputeCapability, in_cubin: int) -> int:
    """The kernel's own static shared memory, from the number in its cubin. Bytes."""
    if cc < CUBIN_COUNTS_SYSTEM_SHARED:
        return in_cubin
    return max(0, in_cubin - SYSTEM_SHARED)


def blocks_per_sm(cc: ComputeCapability, threads: int, registers: int, shared: int) -> int:
    """Blocks of `threads` threads, `registers` a thread and `shared` bytes in all that fit on an SM."""
    limits = LIMITS[cc]
    if shared > limits.smem_block:
        return 0
    warps = -(-threads // WARP)
    warp_registers = _round_up(max(registers, 1) * WARP, REGISTER_UNIT)
    by_registers = REGISTERS_PER_SM // warp_registers // warps
    by_shared = limits.smem_sm // _round_up(shared + SYSTEM_SHARED, SHARED_UNIT)
    return min(limits.blocks, limits.threads // (warps * WARP), by_registers, by_shared)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
