"""The score warps: S = K Q^T for their query rows, the mask, the online softmax, and the weights P for the value warps."""

from __future__ import annotations

from typing import Any

from verify_numba.geometry import EXCHANGE_BUFFERS, TILE, WEIGHT_BUFFERS, Geometry
from verify_numba.kernels.work import CHAIN, FULL_MASK, MASK_WIDE, make_walk


def make_score_role(g: Geometry, ops: Any) -> Any:
    ROWS, STAGES, SCORE_WARPS = g.rows, g.stages, g.score_warps
    STAGE_BYTES, EXCHANGE_BYTES, WEIGHT_BYTES, ALPHA_BYTES = (
        g.stage_bytes, g.exchange_bytes, g.weight_bytes, 4 * g.rows,
    )  # fmt: skip
    at = g.shared
    STAGE, FULL, EXCHANGE, EXCHANGE_FULL = at.stage, at.full, at.exchange, at.exchange_full
    WEIGHTS, WEIGHTS_FULL, WEIGHTS_EMPTY = at.weights, at.weights_full, at.weights_empty
    ALPHA, GREW, MAXIMA, INVERSE = at.alpha, at.grew, at.maxima, at.inverse
    INVERSE_FULL, INVERSE_EMPTY = at.inverse_full, at.inverse_empty

    i32, wait, arrive, load_share, owned_tile = ops.i32, ops.wait, ops.arrive, ops.load_share, ops.owned_tile
    load_q, no_products, no_scores, score, own, send, receive = (
        ops.load_q, ops.no_products, ops.no_scores, ops.score, ops.own, ops.send, ops.receive,
    )  # fmt: skip
    load_index, keep_first, keep_visible, clean_values = (
        ops.load_index, ops.keep_first, ops.keep_visible, ops.clean_values,
    )  # fmt: skip
    lowest, zero_sums, exponents, exceeds, grow = ops.lowest, ops.zero_sums, ops.exponents, ops.exceeds, ops.grow
    rescale, scale_sums, exp2, add_sums = ops.rescale, ops.scale_sums, ops.exp2, ops.add_sums
    store_alpha, store_grew, store_weights = ops.store_alpha, ops.store_grew, ops.store_weights
    store_maxima, load_maxima = ops.store_maxima, ops.load_maxima
    total_sums, store_inverse, store_lse = ops.total_sums, ops.store_inverse, ops.store_lse
    request_of, stop_of, after = make_walk(ops)

    @ops.device
    def exchange_at(base, count):
        """Where tile number `count` is exchanged: its buffer and the first of its barriers, one a score warp."""
        buffer = i32(count & (EXCHANGE_BUFFERS - 1))
        return i32(base + EXCHANGE + EXCHANGE_BYTES * buffer), i32(base + EXCHANGE_FULL + 8 * SCORE_WARPS * buffer)

    @ops.device
    def tree_scores(scores, batch, b, tile, my_row):
        """-inf where the tree mask hides a draft token."""
        request = request_of(batch, b)
        cells, stride = batch.mask, request.T
        if batch.layout != CHAIN:
            cells = batch.mask + load_index(batch.mask_indptr, b, batch.widths & MASK_WIDE)
        if batch.layout == FULL_MASK:
            cells, stride = cells + request.L, i32(request.L + request.T)
        token = i32(TILE * (tile - request.prefix_tiles))
        return keep_visible(scores, cells, stride, batch.layout, my_row, batch.H, request.T, token)

    @ops.device
    def softmax_tile(base, scores, sums, scale, count, me):
        """Online softmax: scores to weights for the value warps, and what their O must be multiplied by first."""
        buffer = i32(count & (WEIGHT_BUFFERS - 1))
        m = load_maxima(base + MAXIMA, me)
        d = exponents(scores, scale, m)
        grew = exceeds(d)
        wait(base + WEIGHTS_EMPTY + 8 * buffer, i32(((count // WEIGHT_BUFFERS) & 1) ^ 1))
        if grew != 0:
            grown = grow(scores, scale, m)
            alpha = rescale(m, grown)
            store_maxima(base + MAXIMA, grown, me)
            store_alpha(base + ALPHA + ALPHA_BYTES * buffer, alpha, me)
            sums = scale_sums(sums, alpha)
            d = exponents(scores, scale, grown)
        p = exp2(d)
        store_grew(base + GREW + 32 * buffer + 4 * me, grew)
        store_weights(base + WEIGHTS + WEIGHT_BYTES * buffer, p, me)
        arrive(base + WEIGHTS_FULL + 8 * buffer)
        return add_sums(sums, p)

    @ops.device
    def finish_rows(batch, block, b, first, last, sums, me, my_row, row_capacity, part_lse, lse):
        """The log-sum-exp of the rows: of a part, or, where this worker did all tiles of the request, of the whole."""
        request = request_of(batch, b)
        rows = i32(min(request.T * batch.H, block.row0 + ROWS))
        m = load_maxima(block.base + MAXIMA, me)
        if last - first < request.tiles:
            slot = i32(block.worker + b)
            store_lse(part_lse, slot * row_capacity, m, sums, me, my_row, rows, 0)
        elif lse != 0:
            store_lse(lse, request.n0 * batch.H, m, sums, me, my_row, rows, 1)

    @ops.device
    def score_role(batch, block, me, scale, q, q_token_stride, q_head_stride, row_capacity, part_lse, lse):
        base = block.base
        my_row = i32(block.row0 + 8 * owned_tile(me))
        share = load_share(base)
        count, stage, parity, segment = i32(0), i32(0), i32(0), i32(0)
        while share.begin < share.end:
            request = request_of(batch, share.b)
            first, last = i32(share.begin - share.start), i32(stop_of(share, request) - share.start)
            rows = i32(request.T * batch.H)
            if first < last and block.row0 < rows:
                queries = load_q(q, q_token_stride, q_head_stride, request.n0, block.row0, rows, batch.H, block.rank, me)
                store_maxima(base + MAXIMA, lowest(), me)
                sums, kept = zero_sums(), no_scores()
                prefix_tiles, L = request.prefix_tiles, request.L
                # Tile `ahead` is multiplied before tile `ahead - 1` goes through the softmax, so that its products run
                # while the other parts of the scores and the exponentials are under way.
                for ahead_ in range(first, i32(last + 1)):
                    ahead, tile, scores, products = i32(ahead_), i32(ahead_ - 1), kept, no_products()
                    if ahead < last:
                        wait(base + FULL + 8 * stage, parity)
                        products = score(base + STAGE + STAGE_BYTES * stage, queries, me)
                    if ahead > first:
                        buffer, bar = exchange_at(base, i32(count - 1))
                        scores = receive(scores, buffer, bar, i32(((count - 1) // EXCHANGE_BUFFERS) & 1), me)
                    if ahead < last:
                        buffer, bar = exchange_at(base, count)
                        send(products, buffer, bar, me, block.rank)
                        kept = own(products)
                        if ahead >= prefix_tiles:
                            clean_values(base + STAGE + STAGE_BYTES * stage, me)
                        stage = i32(stage + 1)
                        if stage == STAGES:
                            stage, parity = i32(0), i32(parity ^ 1)
                    if ahead > first:
                        if tile >= prefix_tiles:
                            scores = tree_scores(scores, batch, share.b, tile, my_row)
                        elif i32(L - TILE * tile) < TILE:
                            scores = keep_first(scores, i32(L - TILE * tile))
                        sums = softmax_tile(base, scores, sums, scale, i32(count - 1), me)
                    count = i32(count + 1)
                count = i32(count - 1)

                sums = total_sums(sums)
                wait(base + INVERSE_EMPTY, i32((segment & 1) ^ 1))
                store_inverse(base + INVERSE, sums, me)
                arrive(base + INVERSE_FULL)
                segment = i32(segment + 1)
                if block.rank == 0:
                    finish_rows(batch, block, share.b, first, last, sums, me, my_row, row_capacity, part_lse, lse)
            # Read anew: over the loop, queries and sums need the registers.
            share = after(share, request_of(batch, share.b))

    return score_role
