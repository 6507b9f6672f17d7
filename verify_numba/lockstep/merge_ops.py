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
from verify_numba.lockstep.machine import current
from verify_numba.lockstep.value_ops import GROUPS, PARTIAL_BYTES, PARTIAL_SHAPE, unpack_partial

Floats = NDArray[np.float32]
STAGED = MMA_N * (COLUMN_GROUP + 2)
"""float32 numbers that one warp leaves in shared memory: maximum, sum and O of its eight rows."""
LN2 = np.float32(np.log(2))
STORE_ALIGN = 4


@dataclass(frozen=True)
class Part:
    """Some parts merged: O = o / s and lse = m + log2 s, a row each; s = 0 if they saw nothing."""

    m: Floats
    """[8]"""
    s: Floats
    """[8]"""
    o: Floats
    """[8, 32]"""


def combine(m: Floats, s: Floats, o: Floats) -> Part:
    """One part from n: [n, 8], [n, 8] and [n, 8, 32]. A part counts for nothing where its m is -inf."""
    top = np.fmax.reduce(m)
    weights = np.where(np.isneginf(m), np.float32(0), np.exp2(m - top))
    shares = np.where(weights[..., None] == 0, np.float32(0), o * weights[..., None])
    return Part(top, (weights * s).sum(axis=0), shares.sum(axis=0))


def empty_part() -> Part:
    zeros = np.zeros(MMA_N, np.float32)
    return Part(np.full(MMA_N, -np.inf, np.float32), zeros, np.zeros((MMA_N, COLUMN_GROUP), np.float32))


def merge_part(
    part: Part,
    part_o: int,
    part_lse: int,
    row_capacity: int,
    slot0: int,
    p: int,
    count: int,
    row_tile: int,
    group: int,
) -> Part:
    """Adds parts p, p + MERGE_WARPS and so on, MERGE_AHEAD of them, as far as there are `count`."""
    memory = current().memory
    index = np.arange(p, min(count, p + MERGE_WARPS * MERGE_AHEAD), MERGE_WARPS, dtype=np.int64)
    row = (slot0 + index) * row_capacity + MMA_N * row_tile
    lse = memory.load_rows(part_lse + 4 * row, 4 * MMA_N, 8).view(np.float32)
    at = part_o + PARTIAL_BYTES * (GROUPS * (row // MMA_N) + group)
    o = unpack_partial(memory.load_rows(at, PARTIAL_BYTES, 16).view(np.float32).reshape(-1, *PARTIAL_SHAPE))
    return combine(
        np.concatenate((part.m[None], lse)),
        np.concatenate((part.s[None], np.ones_like(lse))),
        np.concatenate((part.o[None], o.reshape(-1, MMA_N, COLUMN_GROUP))),
    )


def stage_parts(part: Part) -> None:
    """Leaves this warp's part in shared memory and waits for the others'."""
    warp = current()
    staged = np.concatenate((part.m, part.s, part.o.ravel()))
    warp.write(4 * STAGED * warp.index, np.float32, (STAGED,))[:] = staged
    warp.sync(warp.block.all_warps)


def merge_staged() -> Part | None:
    """All warps' parts merged; warp 0 does it."""
    warp = current()
    if warp.index:
        return None
    staged = warp.read(0, np.float32, (MERGE_WARPS, STAGED))
    m, s, o = np.split(staged, [MMA_N, 2 * MMA_N], axis=1)
    return combine(m, s, o.reshape(MERGE_WARPS, MMA_N, COLUMN_GROUP))


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
