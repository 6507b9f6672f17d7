"""The log-sum-exp merge of partial results: eight query rows and 32 columns of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify_numba.dims import D_V
from verify_numba.geometry import COLUMN_GROUP, MMA_N
from verify_numba.kernels.merge_kernel import MERGE_AHEAD, MERGE_WARPS
from verify_numba.lockstep.bf16 import narrow
from verify_numba.lockstep.executor import current
from verify_numba.lockstep.value_ops import GROUPS, PARTIAL_BYTES, PARTIAL_SHAPE, unpack_partial

Floats = NDArray[np.float32]
STAGED = MMA_N * (COLUMN_GROUP + 2)
"""float32 numbers that one warp leaves in shared memory: O, maximum and sum of its eight rows."""
MERGE_SHARED_BYTES = 4 * STAGED * MERGE_WARPS
LN2 = np.float32(np.log(2))
STORE_ALIGN = 4


@dataclass(frozen=True)
class Part:
    """Some parts merged: O = o / s and lse = m + log2 s, a row each; s = 0 if they saw nothing."""

    m: Floats
    s: Floats
    o: Floats

    def add(self, m: Floats, s: Floats, o: Floats) -> Part:
        """Merges another one, which counts for nothing where its m is -inf, whatever its o holds."""
        top = np.fmax(self.m, m)
        mine = np.where(np.isneginf(self.m), np.float32(0), np.exp2(self.m - top))
        theirs = np.where(np.isneginf(m), np.float32(0), np.exp2(m - top))
        added = np.where(theirs[:, None] == 0, np.float32(0), o * theirs[:, None])
        return Part(top, self.s * mine + s * theirs, self.o * mine[:, None] + added)


def empty_part() -> Part:
    zeros = np.zeros(MMA_N, np.float32)
    return Part(np.full(MMA_N, -np.inf, np.float32), zeros, np.zeros((MMA_N, COLUMN_GROUP), np.float32))


def merge_part(
    part: Part, part_o: int, part_lse: int, row_capacity: int, slot0: int, p: int, count: int, row_tile: int, group: int
) -> Part:
    """Adds parts p, p + MERGE_WARPS and so on, MERGE_AHEAD of them, as far as there are `count`."""
    memory = current().memory
    ones = np.ones(MMA_N, np.float32)
    for i in range(p, min(count, p + MERGE_WARPS * MERGE_AHEAD), MERGE_WARPS):
        row = (slot0 + i) * row_capacity + MMA_N * row_tile
        lse = memory.load(part_lse + 4 * row, np.float32, MMA_N)
        address = part_o + PARTIAL_BYTES * (GROUPS * (row // MMA_N) + group)
        o = memory.load(address, np.float32, PARTIAL_BYTES // 4).reshape(1, *PARTIAL_SHAPE)
        part = part.add(lse, ones, unpack_partial(o))
    return part


def stage_parts(part: Part) -> None:
    """Leaves this warp's part in shared memory and waits for the others'."""
    warp = current()
    staged = np.concatenate((part.m, part.s, part.o.ravel()))
    warp.block.shared.view(4 * STAGED * warp.index, np.float32, (STAGED,))[:] = staged
    warp.sync(warp.block.all_warps)


def merge_staged() -> Part | None:
    """All warps' parts merged in the warps' order; warp 0 does it."""
    warp = current()
    if warp.index:
        return None
    whole = empty_part()
    for staged in warp.block.shared.view(0, np.float32, (MERGE_WARPS, STAGED)):
        m, s, o = np.split(staged, [MMA_N, 2 * MMA_N])
        whole = whole.add(m, s, o.reshape(MMA_N, COLUMN_GROUP))
    return whole


def store_merged(
    part: Part | None, out: int, lse: int, row_offset: int, row_tile: int, group: int, rows: int
) -> None:
    """bf16 results and, with the first column group, natural-log LSE, as far as the request has rows."""
    if part is None:
        return
    memory = current().memory
    count = min(MMA_N, rows - MMA_N * row_tile)
    row = row_offset + MMA_N * row_tile + np.arange(count, dtype=np.int64)
    inverse = np.where(part.s == 0, np.float32(0), np.float32(1) / part.s)
    bits = narrow(part.o * inverse[:, None])[:count]
    memory.store_rows(out + 2 * (D_V * row + COLUMN_GROUP * group), bits.view(np.uint8), STORE_ALIGN)
    if lse and group == 0:
        total = np.where(part.s == 0, np.float32(-np.inf), part.m + np.log2(part.s)) * LN2
        memory.store(lse + 4 * int(row[0]), total[:count])


def merge_ops() -> dict[str, Any]:
    return {
        "empty_part": empty_part,
        "merge_part": merge_part,
        "stage_parts": stage_parts,
        "merge_staged": merge_staged,
        "store_merged": store_merged,
    }
