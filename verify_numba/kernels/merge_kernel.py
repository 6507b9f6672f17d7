"""The log-sum-exp merge of partial results: one block for eight query rows and 32 output columns of a request.

Parts (O_p, lse_p) of disjoint key sets combine to O = sum_p w_p O_p with w_p = 2^(lse_p - lse) (Flash-Decoding's last
step). Each warp merges its parts online, then the warps' results are merged in shared memory the same way. A part that
saw nothing has lse = -inf and weight 0. Requests that one worker did alone are final already and are left alone; a
request without any key gets the empty row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verify_numba.dims import D_V
from verify_numba.geometry import COLUMN_GROUP
from verify_numba.kernels.work import Batch, make_walk

MERGE_WARPS = 8
PART_WORDS = 12
"""What a lane holds of a part: two maxima, two sums, eight values of O."""
MERGE_SHARED_BYTES = MERGE_WARPS * 32 * PART_WORDS * 4
COLUMN_GROUPS = D_V // COLUMN_GROUP
MERGE_AHEAD = 5
"""Parts that one warp loads together, so that their latencies overlap."""


def make_merge_kernel(ops: Any) -> Callable[..., None]:
    """Grid (row tiles * column groups, bs), `32 * MERGE_WARPS` threads; a row tile is eight rows of the capacity."""
    i32, warp_id, block_x, row_block = ops.i32, ops.warp_id, ops.block_x, ops.row_block
    request_span, after_previous = ops.request_span, ops.after_previous
    empty_part, merge_part, stage_parts, merge_staged, store_merged = (
        ops.empty_part, ops.merge_part, ops.stage_parts, ops.merge_staged, ops.store_merged,
    )  # fmt: skip
    request_of, _, _ = make_walk(ops)

    def merge_kernel(
        qo_indptr, kv_indptr, widths, parts, bs, H, min_tiles, workers, row_capacity,
        part_o, part_lse, out, lse,
    ):  # fmt: skip
        b, row_tile, group = row_block(), i32(block_x() // COLUMN_GROUPS), i32(block_x() % COLUMN_GROUPS)
        batch = Batch(bs, H, parts, 0, widths, min_tiles, qo_indptr, kv_indptr, 0, 0, 0)
        request = request_of(batch, b)
        first, count = request_span(batch, b, workers)
        rows = i32(request.T * H)
        # All blocks wait, also those with nothing to do: whoever comes next in the stream waits for this kernel alone,
        # so it must not end before the verify kernel does.
        after_previous()
        if 8 * row_tile < rows and count != 1:
            part = empty_part()
            for p in range(warp_id(), count, MERGE_WARPS * MERGE_AHEAD):
                part = merge_part(part, part_o, part_lse, row_capacity, i32(first + b), i32(p), count, row_tile, group)
            stage_parts(part)
            part = merge_staged()
            store_merged(part, out, lse, request.n0 * H, row_tile, group, rows)

    return merge_kernel
