"""The softmax warps: parts of scores to scores, the mask, the online softmax, and the weights P for the value warps of
both blocks."""

from __future__ import annotations

from typing import Any

from verify_numba.geometry import PARTNER_BUFFERS, TILE, WARP, WEIGHTS_AHEAD, Geometry
from verify_numba.kernels.work import CHAIN, FULL_MASK, MASK_WIDE, make_step, make_walk


def make_softmax_role(g: Geometry, ops: Any) -> Any:
    ROWS, CLUSTER, PART_BYTES = g.rows, g.cluster, g.k_groups * g.score_bytes
    PARTNER_SHIFT = PARTNER_BUFFERS.bit_length() - 1
    WEIGHT_BYTES, NOTE_BYTES, INVERSE_BUFFERS = g.weight_bytes, g.note_bytes, g.inverse_buffers
    NOTE_FROM_WARP = 4 * WARP
    WEIGHT_BUFFERS, step = g.weight_buffers, make_step(ops)
    at = g.shared
    SCORES, PARTNER, SCORES_FULL, SCORES_EMPTY = at.scores, at.partner, at.scores_full, at.scores_empty
    WEIGHTS, WEIGHTS_FULL, WEIGHTS_EMPTY = at.weights, at.weights_full, at.weights_empty
    ALPHA, INVERSE = at.alpha, at.inverse
    INVERSE_FULL, INVERSE_EMPTY = at.inverse_full, at.inverse_empty
    i32, wait, wait_cluster, arrive, arrive_expecting = (
        ops.i32, ops.wait, ops.wait_cluster, ops.arrive, ops.arrive_expecting,
    )  # fmt: skip
    arm_scores, gather_scores, reach = ops.arm_scores, ops.gather_scores, ops.reach
    load_index, nothing_seen, seen, keep_first, keep_seen = (
        ops.load_index, ops.nothing_seen, ops.seen, ops.keep_first, ops.keep_seen,
    )  # fmt: skip
    lowest, zero_sums, exponents, exceeds, grow = ops.lowest, ops.zero_sums, ops.exponents, ops.exceeds, ops.grow
    rescale, scale_sums, exp2, add_sums = ops.rescale, ops.scale_sums, ops.exp2, ops.add_sums
    unset_state, unset_scores = ops.unset_state, ops.unset_scores
    weights_from_partner, post_note, post_weights = ops.weights_from_partner, ops.post_note, ops.post_weights
    total_sums, inverses, store_lse = ops.total_sums, ops.inverses, ops.store_lse
    request_of, stop_of, after = make_walk(ops)

    @ops.device
    def whole_scores(base, count, me, rank):
        """All parts of this warp's scores, of both blocks, added up."""
        buffer = i32(count & (PARTNER_BUFFERS - 1))
        arm_scores(base + SCORES_FULL + 8 * buffer, me, rank)
        wait_cluster(base + SCORES_FULL + 8 * buffer, i32((count >> PARTNER_SHIFT) & 1))
        scores = gather_scores(base + SCORES, base + PARTNER + PART_BYTES * buffer, me, rank)
        arrive(base + SCORES_EMPTY)
        return scores

    @ops.device
    def mask_cells(batch, request, b):
        """Where the request's tree mask lies, and from one of its rows to the next."""
        cells, stride = batch.mask, request.T
        if batch.layout != CHAIN:
            cells = batch.mask + load_index(batch.mask_indptr, b, batch.widths & MASK_WIDE)
        if batch.layout == FULL_MASK:
            cells, stride = cells + request.L, i32(request.L + request.T)
        return cells, stride

    @ops.device
    def finish_rows(batch, block, request, b, whole, m, sums, my_row, row_capacity, part_lse, lse):
        """The log-sum-exp of the rows: of a part, or, where this worker did all tiles of the request, of the whole."""
        rows = i32(min(request.T * batch.H, block.row0 + ROWS))
        if not whole:
            slot = i32(block.worker + b)
            store_lse(part_lse, slot * row_capacity, m, sums, my_row, rows, 0)
        elif lse != 0:
            store_lse(lse, request.n0 * batch.H, m, sums, my_row, rows, 1)

    @ops.device
    def softmax_role(batch, block, share, me, scale, row_capacity, part_lse, lse):
        base, rank, to_partner = block.base, block.rank, reach(block.base, i32(block.rank ^ 1))
        my_tile = i32(CLUSTER * me + rank)
        my_row = i32(block.row0 + 8 * my_tile)
        from_partner = i32(weights_from_partner(me, rank) + NOTE_FROM_WARP)
        count, buffer, ahead, turn, segment, inverse = i32(0), i32(0), i32(0), i32(1), i32(0), i32(0)
        while share.begin < share.end:
            request = request_of(batch, share.b)
            first, last = i32(share.begin - share.start), i32(stop_of(share, request) - share.start)
            if first < last and block.row0 < request.T * batch.H:
                m, sums, visible = lowest(), zero_sums(), nothing_seen()
                cells, stride = mask_cells(batch, request, share.b)
                # The mask does not depend on the scores: it is read while they are on their way.
                if first >= request.prefix_tiles:
                    visible = seen(cells, stride, batch.layout, my_row, batch.H, request.T,
                                   i32(TILE * (first - request.prefix_tiles)))  # fmt: skip
                # All keys of these tiles count for every row; prefix_tiles is less where the prefix is left out.
                whole_tiles = i32(min(i32(request.L // TILE), request.prefix_tiles))
                following = whole_scores(base, count, me, rank)
                tile = first
                while tile < last:
                    # What is unset takes no registers, and no moves to keep it, where it is not needed.
                    scores, following, alpha = following, unset_scores(), unset_state()
                    if tile >= whole_tiles:
                        if tile < request.prefix_tiles:
                            scores = keep_first(scores, i32(request.L - TILE * tile))
                        else:
                            scores = keep_seen(scores, visible)

                    d = exponents(scores, scale, m)
                    grew = exceeds(d)
                    if grew != 0:
                        grown = grow(scores, scale, m)
                        alpha = rescale(m, grown)
                        sums, m = scale_sums(sums, alpha), grown
                        d = exponents(scores, scale, m)
                    count = i32(count + 1)
                    tile = i32(tile + 1)
                    if tile < last:
                        if tile >= request.prefix_tiles:
                            visible = seen(cells, stride, batch.layout, my_row, batch.H, request.T,
                                           i32(TILE * (tile - request.prefix_tiles)))  # fmt: skip
                        following = whole_scores(base, count, me, rank)
                    p = exp2(d)
                    wait(base + WEIGHTS_EMPTY + 8 * ahead, turn)
                    full = i32(base + WEIGHTS_FULL + 8 * buffer)
                    post_note(base + ALPHA + NOTE_BYTES * buffer, alpha, grew, my_tile, full, to_partner)
                    post_weights(base + WEIGHTS + WEIGHT_BYTES * buffer, p, my_tile, full, to_partner)
                    arrive_expecting(full, from_partner)
                    sums = add_sums(sums, p)
                    ahead, turn = step(ahead, turn, WEIGHTS_AHEAD)
                    buffer, _ = step(buffer, i32(0), WEIGHT_BUFFERS)

                sums = total_sums(sums)
                wait(base + INVERSE_EMPTY, i32((segment & 1) ^ 1))
                full = i32(base + INVERSE_FULL + 8 * inverse)
                post_note(base + INVERSE + NOTE_BYTES * inverse, inverses(sums), i32(0), my_tile, full, to_partner)
                arrive_expecting(full, i32(NOTE_FROM_WARP))
                segment = i32(segment + 1)
                inverse, _ = step(inverse, i32(0), INVERSE_BUFFERS)
                finish_rows(batch, block, request, share.b, last - first == request.tiles, m, sums, my_row,
                            row_capacity, part_lse, lse)  # fmt: skip
            share = after(share, request)

    return softmax_role
