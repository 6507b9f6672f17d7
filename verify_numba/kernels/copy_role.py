"""The copy warps: slot numbers to pool rows, pool rows to the ring of stages, well ahead of the warps that read."""

from __future__ import annotations

from typing import Any

from verify_numba.geometry import Geometry
from verify_numba.kernels.work import make_walk


def make_copy_role(g: Geometry, ops: Any) -> Any:
    STAGES, STAGE_BYTES, COPY_WARPS = g.stages, g.stage_bytes, g.copy_warps
    STAGE, FULL, EMPTY = g.shared.stage, g.shared.full, g.shared.empty
    i32, wait = ops.i32, ops.wait
    load_slots, copy_rows = ops.load_slots, ops.copy_rows
    request_of, stop_of, after = make_walk(ops)

    @ops.device
    def copy_role(batch, block, share, me, k, k_stride, pool, pool_stride):
        stage, parity, turn = i32(0), i32(1), i32(0)
        while share.begin < share.end:
            request = request_of(batch, share.b)
            first, last = i32(share.begin - share.start), i32(stop_of(share, request) - share.start)
            if first < last and block.row0 < request.T * batch.H:
                # Lanes 0..15 hold the slots of one tile, lanes 16..31 those of the next; the pair after is on its way.
                # Two copy warps take turns, tile by tile, across requests too: a warp that passed over many tiles
                # without a wait could be two rounds ahead of a stage, and take the parity of an older phase for the
                # one it needs.
                following = load_slots(batch, request, first, last)
                for pair in range(first, last, 2):
                    slots = following
                    following = load_slots(batch, request, i32(pair + 2), last)
                    for half in range(2):
                        tile = i32(pair + half)
                        if tile < last:
                            if COPY_WARPS == 1 or turn == me:
                                wait(block.base + EMPTY + 8 * stage, parity)
                                rows, stride = pool, pool_stride
                                if tile >= request.prefix_tiles:
                                    rows, stride = k, k_stride
                                copy_rows(
                                    block.base + STAGE + STAGE_BYTES * stage,
                                    block.base + FULL + 8 * stage,
                                    rows, stride, slots, half, block.rank,
                                )  # fmt: skip
                            stage, turn = i32(stage + 1), i32(turn ^ 1)
                            if stage == STAGES:
                                stage, parity = i32(0), i32(parity ^ 1)
            share = after(share, request)

    return copy_role
