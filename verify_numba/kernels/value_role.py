"""The value warps: O = alpha O + V^T P over the tiles of a request, then the partial or the final result."""

from __future__ import annotations

from typing import Any

from verify_numba.geometry import WEIGHTS_AHEAD, Geometry
from verify_numba.kernels.work import make_step, make_walk


def make_value_role(g: Geometry, ops: Any) -> Any:
    STAGES, STAGE_BYTES, WEIGHT_BYTES, NOTE_BYTES = g.stages, g.stage_bytes, g.weight_bytes, g.note_bytes
    WEIGHT_BUFFERS, INVERSE_BUFFERS = g.weight_buffers, g.inverse_buffers
    at = g.shared
    STAGE, FULL, EMPTY = at.stage, at.full, at.empty
    WEIGHTS, WEIGHTS_FULL, WEIGHTS_EMPTY = at.weights, at.weights_full, at.weights_empty
    ALPHA, INVERSE = at.alpha, at.inverse
    INVERSE_FULL, INVERSE_EMPTY = at.inverse_full, at.inverse_empty
    i32, wait, wait_cluster, arrive = ops.i32, ops.wait, ops.wait_cluster, ops.arrive
    zero_o, any_grew, scale_o, accumulate = ops.zero_o, ops.any_grew, ops.scale_o, ops.accumulate
    store_partial, store_out = ops.store_partial, ops.store_out
    step, (request_of, stop_of, after) = make_step(ops), make_walk(ops)

    @ops.device
    def value_role(batch, block, share, me, row_capacity, part_o, out):
        base = block.base
        stage, parity, buffer, turn, ahead = i32(0), i32(0), i32(0), i32(0), i32(0)
        inverse, inverse_turn = i32(0), i32(0)
        while share.begin < share.end:
            request = request_of(batch, share.b)
            first, last = i32(share.begin - share.start), i32(stop_of(share, request) - share.start)
            rows = i32(request.T * batch.H)
            if first < last and block.row0 < rows:
                o = zero_o()
                tile = first
                while tile < last:
                    wait(base + FULL + 8 * stage, parity)
                    wait_cluster(base + WEIGHTS_FULL + 8 * buffer, turn)
                    if any_grew(base + ALPHA + NOTE_BYTES * buffer) != 0:
                        o = scale_o(o, base + ALPHA + NOTE_BYTES * buffer)
                    o = accumulate(o, base + STAGE + STAGE_BYTES * stage, base + WEIGHTS + WEIGHT_BYTES * buffer, me)
                    arrive(base + EMPTY + 8 * stage)
                    arrive(base + WEIGHTS_EMPTY + 8 * ahead)
                    tile = i32(tile + 1)
                    stage, parity = step(stage, parity, STAGES)
                    buffer, turn = step(buffer, turn, WEIGHT_BUFFERS)
                    ahead, _ = step(ahead, i32(0), WEIGHTS_AHEAD)

                wait_cluster(base + INVERSE_FULL + 8 * inverse, inverse_turn)
                note = i32(base + INVERSE + NOTE_BYTES * inverse)
                if last - first < request.tiles:
                    slot = i32(block.worker + share.b)
                    store_partial(o, note, part_o, slot * row_capacity + block.row0, block.rank, me)
                else:
                    store_out(o, note, out, request.n0 * batch.H, block.row0, rows, block.rank, me)
                arrive(base + INVERSE_EMPTY)
                inverse, inverse_turn = step(inverse, inverse_turn, INVERSE_BUFFERS)
            share = after(share, request)

    return value_role
