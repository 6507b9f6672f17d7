"""The score warps: S = K Q^T. Each multiplies one group of row tiles over a share of the block's columns and sends its
part of the scores to the softmax warps, and to those of the partner block."""

from __future__ import annotations

from typing import Any

from verify_numba.geometry import SCORE_BUFFERS, Geometry
from verify_numba.kernels.work import make_walk


def make_score_role(g: Geometry, ops: Any) -> Any:
    STAGES, STAGE_BYTES, SCORE_BYTES = g.stages, g.stage_bytes, g.score_bytes
    K_GROUPS, GROUP_ROWS = g.k_groups, 8 * g.group_tiles
    at = g.shared
    STAGE, FULL, SCORES, SCORES_FULL, SCORES_EMPTY = at.stage, at.full, at.scores, at.scores_full, at.scores_empty
    i32, wait, wait_cluster, load_share = ops.i32, ops.wait, ops.wait_cluster, ops.load_share
    load_q, score, send, clean_values = ops.load_q, ops.score, ops.send, ops.clean_values
    request_of, stop_of, after = make_walk(ops)

    @ops.device
    def score_role(batch, block, me, q, q_token_stride, q_head_stride):
        base = block.base
        group, part = i32(me // K_GROUPS), i32(me % K_GROUPS)
        share = load_share(base)
        count, stage, parity = i32(0), i32(0), i32(0)
        while share.begin < share.end:
            request = request_of(batch, share.b)
            first, last = i32(share.begin - share.start), i32(stop_of(share, request) - share.start)
            rows = i32(request.T * batch.H)
            if first < last and block.row0 < rows:
                row = i32(block.row0 + GROUP_ROWS * group)
                queries = load_q(q, q_token_stride, q_head_stride, request.n0, row, rows, batch.H, block.rank, part)
                prefix_tiles = request.prefix_tiles
                for tile in range(first, last):
                    wait(base + FULL + 8 * stage, parity)
                    products = score(base + STAGE + STAGE_BYTES * stage, queries, part)
                    if tile >= prefix_tiles:
                        clean_values(base + STAGE + STAGE_BYTES * stage, me)
                    buffer = i32(count & (SCORE_BUFFERS - 1))
                    wait_cluster(base + SCORES_EMPTY + 8 * buffer, i32(((count // SCORE_BUFFERS) & 1) ^ 1))
                    send(products, base + SCORES + SCORE_BYTES * buffer, base + SCORES_FULL + 8 * buffer,
                         group, part, block.rank)  # fmt: skip
                    count = i32(count + 1)
                    stage = i32(stage + 1)
                    if stage == STAGES:
                        stage, parity = i32(0), i32(parity ^ 1)
            share = after(share, request)

    return score_role
