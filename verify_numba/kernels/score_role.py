"""The score warps: S = K Q^T. Each multiplies one group of row tiles over a share of the block's columns and adds what
the warps of other shares have; the last has the block's part of the scores, for the softmax warps of both blocks."""

from __future__ import annotations

from typing import Any

from verify_numba.geometry import PARTNER_BUFFERS, SCORE_BUFFERS, Geometry
from verify_numba.kernels.work import make_walk


def make_score_role(g: Geometry, ops: Any) -> Any:
    CLUSTER, STAGES, STAGE_BYTES, SCORE_BYTES = g.cluster, g.stages, g.stage_bytes, g.score_bytes
    K_GROUPS, GROUPS, GROUP_ROWS = g.k_groups, g.groups, 8 * g.group_tiles
    SCORE_SHIFT = SCORE_BUFFERS.bit_length() - 1
    at = g.shared
    STAGE, FULL, RELAY, RELAY_FULL, RELAY_EMPTY = at.stage, at.full, at.relay, at.relay_full, at.relay_empty
    SCORES, PARTNER, SCORES_FULL, SCORES_EMPTY = at.scores, at.partner, at.scores_full, at.scores_empty
    i32, wait, arrive = ops.i32, ops.wait, ops.arrive
    load_q, score, clean_values = ops.load_q, ops.score, ops.clean_values
    add_part, store_part, send_part = ops.add_part, ops.store_part, ops.send_part
    request_of, stop_of, after = make_walk(ops)

    @ops.device
    def hand_on(base, products, count, group, turn_in_relay, rank):
        """Add what the warps before have; pass the sum to the next one, or, as the last, to the softmax warps."""
        here, there = i32(count & (SCORE_BUFFERS - 1)), i32(count & (PARTNER_BUFFERS - 1))
        parity = i32((count >> SCORE_SHIFT) & 1)
        if K_GROUPS > 1 and turn_in_relay > 0:
            relay = i32((K_GROUPS - 1) * here + turn_in_relay - 1)
            bar = i32(8 * (GROUPS * relay + group))
            wait(base + RELAY_FULL + bar, parity)
            products = add_part(products, base + RELAY + SCORE_BYTES * relay, group)
            arrive(base + RELAY_EMPTY + bar)
        if K_GROUPS > 1 and turn_in_relay < K_GROUPS - 1:
            relay = i32((K_GROUPS - 1) * here + turn_in_relay)
            bar = i32(8 * (GROUPS * relay + group))
            wait(base + RELAY_EMPTY + bar, i32(parity ^ 1))
            store_part(products, base + RELAY + SCORE_BYTES * relay, group)
            arrive(base + RELAY_FULL + bar)
        else:
            wait(base + SCORES_EMPTY + 8 * here, i32(parity ^ 1))
            if CLUSTER == 2:
                send_part(products, base + PARTNER + SCORE_BYTES * there, base + SCORES_FULL + 8 * there, group, rank)
            store_part(products, base + SCORES + SCORE_BYTES * here, group)
            arrive(base + SCORES_FULL + 8 * there)

    @ops.device
    def score_role(batch, block, share, me, q, q_token_stride, q_head_stride):
        base = block.base
        group, part = i32(me // K_GROUPS), i32(me % K_GROUPS)
        count, stage, parity = i32(0), i32(0), i32(0)
        while share.begin < share.end:
            request = request_of(batch, share.b)
            first, last = i32(share.begin - share.start), i32(stop_of(share, request) - share.start)
            rows = i32(request.T * batch.H)
            if first < last and block.row0 < rows:
                row = i32(block.row0 + GROUP_ROWS * group)
                queries = load_q(q, q_token_stride, q_head_stride, request.n0, row, rows, batch.H, block.rank, part)
                # The relay starts one warp further on with every tile, so that each has its share of finishing the sums;
                # anew with every request, so that the order of a sum does not depend on the requests before.
                prefix_tiles, turn_in_relay = request.prefix_tiles, part
                for tile in range(first, last):
                    wait(base + FULL + 8 * stage, parity)
                    products = score(base + STAGE + STAGE_BYTES * stage, queries, part)
                    if tile >= prefix_tiles:
                        clean_values(base + STAGE + STAGE_BYTES * stage, me)
                    hand_on(base, products, count, group, turn_in_relay, block.rank)
                    count, turn_in_relay = i32(count + 1), i32(turn_in_relay + 1)
                    if turn_in_relay == K_GROUPS:
                        turn_in_relay = i32(0)
                    stage = i32(stage + 1)
                    if stage == STAGES:
                        stage, parity = i32(0), i32(parity ^ 1)
            share = after(share, request)

    return score_role
