"""The score warps: S = K Q^T. Each multiplies one group of row tiles over a share of the block's columns, and has a
part of the scores of every row tile, each for the softmax warps of the block that the tile is for."""

from __future__ import annotations

from typing import Any

from verify_numba.geometry import PARTNER_BUFFERS, Geometry
from verify_numba.kernels.work import make_step, make_walk


def make_score_role(g: Geometry, ops: Any) -> Any:
    STAGES, STAGE_BYTES, SCORE_BYTES = g.stages, g.stage_bytes, g.score_bytes
    CLUSTER, K_GROUPS, GROUP_TILES = g.cluster, g.k_groups, g.group_tiles
    at = g.shared
    STAGE, FULL = at.stage, at.full
    SCORES, PARTNER, SCORES_FULL, SCORES_EMPTY = at.scores, at.partner, at.scores_full, at.scores_empty
    i32, wait, arrive, reach = ops.i32, ops.wait, ops.arrive, ops.reach
    load_q, score, clean_values = ops.load_q, ops.score, ops.clean_values
    deliver_even, deliver_odd, step = ops.deliver_even, ops.deliver_odd, make_step(ops)
    request_of, stop_of, after = make_walk(ops)

    @ops.device
    def hand_over(base, products, count, first_tile, part, own_parity, to_partner):
        """This warp's part of the scores to the softmax warps of both blocks."""
        buffer = i32(count & (PARTNER_BUFFERS - 1))
        wait(base + SCORES_EMPTY, i32((count & 1) ^ 1))
        own = i32(base + SCORES + SCORE_BYTES * part)
        partner = i32(base + PARTNER + SCORE_BYTES * (K_GROUPS * buffer + part) + to_partner)
        full = i32(base + SCORES_FULL + 8 * buffer)
        if own_parity == 0:
            deliver_even(products, own, partner, i32(full + to_partner), first_tile)
        else:
            deliver_odd(products, own, partner, i32(full + to_partner), first_tile)
        arrive(full)

    @ops.device
    def score_role(batch, block, share, me, q, q_token_stride, q_head_stride):
        base = block.base
        first_tile, part = i32(GROUP_TILES * (me // K_GROUPS)), i32(me % K_GROUPS)
        # The blocks take the row tiles in turns: of this warp's, the even or the odd ones are this block's.
        own_parity = i32((first_tile ^ block.rank) & (CLUSTER - 1))
        to_partner = reach(base, i32(block.rank ^ 1))
        count, stage, parity = i32(0), i32(0), i32(0)
        while share.begin < share.end:
            request = request_of(batch, share.b)
            first, last = i32(share.begin - share.start), i32(stop_of(share, request) - share.start)
            rows = i32(request.T * batch.H)
            if first < last and block.row0 < rows:
                row = i32(block.row0 + 8 * first_tile)
                queries = load_q(q, q_token_stride, q_head_stride, request.n0, row, rows, batch.H, block.rank, part)
                prefix_tiles = request.prefix_tiles
                tile = first
                while tile < last:
                    wait(base + FULL + 8 * stage, parity)
                    products = score(base + STAGE + STAGE_BYTES * stage, queries, part)
                    if tile >= prefix_tiles:
                        clean_values(base + STAGE + STAGE_BYTES * stage, me)
                    hand_over(base, products, count, first_tile, part, own_parity, to_partner)
                    tile, count = i32(tile + 1), i32(count + 1)
                    stage, parity = step(stage, parity, STAGES)
            share = after(share, request)

    return score_role
