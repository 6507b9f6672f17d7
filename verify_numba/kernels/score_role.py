"""The score warps: S = K Q^T for their query rows, the mask, the online softmax, and the weights P for the value warps."""

from __future__ import annotations

from typing import Any

from verify_numba.geometry import EXCHANGE_BUFFERS, TILE, WEIGHT_BUFFERS, Geometry
from verify_numba.kernels.work import CHAIN, FULL_MASK, MASK_WIDE, make_walk


def make_score_role(g: Geometry, ops: Any) -> Any:
    CLUSTER, STAGES, SCORE_WARPS, PER_WARP = g.cluster, g.stages, g.score_warps, g.tiles_per_score_warp
    STAGE_BYTES, EXCHANGE_BYTES, WEIGHT_BYTES, ALPHA_BYTES = (
        g.stage_bytes, g.exchange_bytes, g.weight_bytes, 4 * g.rows,
    )  # fmt: skip
    at = g.shared
    STAGE, FULL, EXCHANGE, EXCHANGE_FULL = at.stage, at.full, at.exchange, at.exchange_full
    WEIGHTS, WEIGHTS_FULL, WEIGHTS_EMPTY = at.weights, at.weights_full, at.weights_empty
    ALPHA, GREW, INVERSE = at.alpha, at.grew, at.inverse
    INVERSE_FULL, INVERSE_EMPTY = at.inverse_full, at.inverse_empty

    i32, wait, wait_cluster, arrive, first_share = ops.i32, ops.wait, ops.wait_cluster, ops.arrive, ops.first_share
    load_q, score, send, receive = ops.load_q, ops.score, ops.send, ops.receive
    load_index, keep_first, keep_visible, clean_values = (
        ops.load_index, ops.keep_first, ops.keep_visible, ops.clean_values,
    )  # fmt: skip
    lowest, zero_sums, exponents, exceeds, grow = ops.lowest, ops.zero_sums, ops.exponents, ops.exceeds, ops.grow
    rescale, scale_sums, exp2, add_sums = ops.rescale, ops.scale_sums, ops.exp2, ops.add_sums
    store_alpha, store_grew, store_weights = ops.store_alpha, ops.store_grew, ops.store_weights
    total_sums, store_inverse, store_lse = ops.total_sums, ops.store_inverse, ops.store_lse
    request_of, stop_of, after = make_walk(ops)

    @ops.device
    def score_tile(base, queries, me, count, stage, parity, rank):
        """Scores of the tile in `stage`, over this block's columns; on their way to the partner when they return."""
        wait(base + FULL + 8 * stage, parity)
        scores = score(base + STAGE + STAGE_BYTES * stage, queries, me)
        if CLUSTER == 2:
            buffer = i32(count & (EXCHANGE_BUFFERS - 1))
            send(scores, base + EXCHANGE + EXCHANGE_BYTES * buffer,
                 base + EXCHANGE_FULL + 8 * (SCORE_WARPS * buffer + me), me, rank)  # fmt: skip
        return scores

    @ops.device
    def whole_scores(scores, base, me, count):
        """Both blocks' columns added up."""
        if CLUSTER == 2:
            buffer = i32(count & (EXCHANGE_BUFFERS - 1))
            wait_cluster(base + EXCHANGE_FULL + 8 * (SCORE_WARPS * buffer + me), i32((count // EXCHANGE_BUFFERS) & 1))
            scores = receive(scores, base + EXCHANGE + EXCHANGE_BYTES * buffer, me)
        return scores

    @ops.device
    def visible_scores(scores, batch, request, b, tile, my_row):
        """-inf where the row does not see the key: behind the end of the prefix, or where the tree mask says no."""
        if tile >= request.prefix_tiles:
            cells, stride = batch.mask, request.T
            if batch.layout != CHAIN:
                cells = batch.mask + load_index(batch.mask_indptr, b, batch.widths & MASK_WIDE)
            if batch.layout == FULL_MASK:
                cells, stride = cells + request.L, i32(request.L + request.T)
            token = i32(TILE * (tile - request.prefix_tiles))
            scores = keep_visible(scores, cells, stride, batch.layout, my_row, batch.H, request.T, token)
        elif request.L - TILE * tile < TILE:
            scores = keep_first(scores, i32(request.L - TILE * tile))
        return scores

    @ops.device
    def score_role(batch, block, me, scale, q, q_token_stride, q_head_stride, row_capacity, part_lse, lse):
        base = block.base
        my_tile = i32(PER_WARP * me)
        my_row = i32(block.row0 + 8 * my_tile)
        share = first_share(batch, block.worker, block.workers)
        count, stage, parity, segment = i32(0), i32(0), i32(0), i32(0)
        while share.begin < share.end:
            request = request_of(batch, share.b)
            first, last = i32(share.begin - share.start), i32(stop_of(share, request) - share.start)
            rows = i32(request.T * batch.H)
            if first < last and block.row0 < rows:
                queries = load_q(q, q_token_stride, q_head_stride, request.n0, my_row, rows, batch.H, block.rank)
                m, sums = lowest(), zero_sums()
                following = score_tile(base, queries, me, count, stage, parity, block.rank)
                for tile_ in range(first, last):
                    tile, scores, my_stage = i32(tile_), following, stage
                    stage = i32(stage + 1)
                    if stage == STAGES:
                        stage, parity = i32(0), i32(parity ^ 1)
                    # One tile ahead: its products run while this tile's partner scores and exponentials are under way.
                    if tile + 1 < last:
                        following = score_tile(base, queries, me, i32(count + 1), stage, parity, block.rank)
                    scores = whole_scores(scores, base, me, count)
                    if tile >= request.prefix_tiles:
                        clean_values(base + STAGE + STAGE_BYTES * my_stage, me)
                    scores = visible_scores(scores, batch, request, share.b, tile, my_row)

                    buffer = i32(count & (WEIGHT_BUFFERS - 1))
                    wait(base + WEIGHTS_EMPTY + 8 * buffer, i32(((count // WEIGHT_BUFFERS) & 1) ^ 1))
                    d = exponents(scores, scale, m)
                    grew = exceeds(d)
                    if grew != 0:
                        grown = grow(scores, scale, m)
                        alpha = rescale(m, grown)
                        store_alpha(base + ALPHA + ALPHA_BYTES * buffer, alpha, my_tile)
                        sums, m = scale_sums(sums, alpha), grown
                        d = exponents(scores, scale, m)
                    p = exp2(d)
                    sums = add_sums(sums, p)
                    store_grew(base + GREW + 32 * buffer + 4 * me, grew)
                    store_weights(base + WEIGHTS + WEIGHT_BYTES * buffer, p, my_tile)
                    arrive(base + WEIGHTS_FULL + 8 * buffer)
                    count = i32(count + 1)

                sums = total_sums(sums)
                wait(base + INVERSE_EMPTY, i32((segment & 1) ^ 1))
                store_inverse(base + INVERSE, sums, my_tile)
                arrive(base + INVERSE_FULL)
                segment = i32(segment + 1)
                if block.rank == 0:
                    if last - first < request.tiles:
                        slot = i32(block.worker + share.b)
                        store_lse(part_lse, slot * row_capacity, m, sums, my_row, rows, 0)
                    elif lse != 0:
                        store_lse(lse, request.n0 * batch.H, m, sums, my_row, rows, 1)
            share = after(share, request)

    return score_role
