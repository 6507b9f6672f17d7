"""Tree-verify attention over a paged latent cache: the dense prefix, then the masked draft tail, split over blocks.

Every request is one sequence of key tiles: its prefix, 16 slots a tile, then its draft tokens, 16 a tile. The sequences
of all requests follow one another, and each worker (a block, or a cluster of two) takes an equal share of the whole:
one long request spreads over all multiprocessors, many short ones take one each, and nothing depends on lengths that
the host knows. A share that covers a whole request writes the result; any other writes a partial, for the merge.

Inside a block the warps have four roles, joined by mbarriers in shared memory:

    copy    slots -> rows -> a ring of stages
    score   S = K Q^T of all rows over the block's columns, each row tile to the block that it is for
    softmax of the block's row tiles: both blocks' parts added up, the mask, the online softmax -> weights P, to both
    value   O = alpha O + V^T P of all rows for the block's columns

A block ends when its value warps have their last weights and denominators. By then it has received all that its
partner sends, so nothing can arrive at a block that has ended, and no barrier is needed at the end.

The method is FlashAttention's online softmax (Dao et al. 2022, arXiv 2205.14135) split over the keys (Flash-Decoding,
Dao et al. 2023); O is rescaled only when a maximum has grown by more than 2^8. The same source runs on a CPU: `ops`
brings each operation on a warp's tile either as PTX or as NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verify_numba.geometry import Geometry
from verify_numba.kernels.copy_role import make_copy_role
from verify_numba.kernels.score_role import make_score_role
from verify_numba.kernels.softmax_role import make_softmax_role
from verify_numba.kernels.value_role import make_value_role
from verify_numba.kernels.work import Batch, Block


def make_verify_kernel(g: Geometry, ops: Any) -> Callable[..., None]:
    """The kernel of one variant; `ops` is `ptx_ops(g)` or `numpy_ops(g)`.

    Grid (cluster * workers, row blocks), `g.threads` threads. Pointers are int64 addresses, strides are bytes.
    """
    ROWS, FIRST_SCORE_WARP, FIRST_SOFTMAX_WARP, FIRST_COPY_WARP = (
        g.rows, g.value_warps, g.first_softmax_warp, g.first_copy_warp,
    )  # fmt: skip
    COPY_WARPS = g.copy_warps
    i32, warp_id, shared_base = ops.i32, ops.warp_id, ops.shared_base
    cluster_id, cluster_count, cluster_rank, row_block, row_blocks = (
        ops.cluster_id, ops.cluster_count, ops.cluster_rank, ops.row_block, ops.row_blocks,
    )  # fmt: skip
    release_next, first_share = ops.release_next, ops.first_share
    init_barriers, announce, await_start, settle = ops.init_barriers, ops.announce, ops.await_start, ops.settle
    copy_role, score_role = make_copy_role(g, ops), make_score_role(g, ops)
    softmax_role, value_role = make_softmax_role(g, ops), make_value_role(g, ops)

    def verify_kernel(
        q, q_token_stride, q_head_stride, k, k_stride, pool, pool_stride,
        qo_indptr, kv_indptr, kv_indices, mask, mask_indptr,
        widths, layout, parts, bs, H, min_tiles, scale,
        part_o, part_lse, out, lse,
    ):  # fmt: skip
        warp = warp_id()
        batch = Batch(bs, H, parts, layout, widths, min_tiles, qo_indptr, kv_indptr, kv_indices, mask, mask_indptr)
        block = Block(cluster_id(), cluster_count(), cluster_rank(), i32(ROWS * row_block()), shared_base())
        row_capacity = i32(ROWS * row_blocks())
        # While one warp sets up the barriers, all find out what their block has to do; that warp copies at once, the
        # others wait until the barriers are there.
        if warp == FIRST_COPY_WARP:
            release_next()
            init_barriers(block.base)
            announce()
        share = first_share(batch, block.worker, block.workers)
        if warp == FIRST_COPY_WARP:
            copy_role(batch, block, share, i32(0), k, k_stride, pool, pool_stride)
            settle()
        else:
            await_start()
            if warp < FIRST_SCORE_WARP:
                value_role(batch, block, share, warp, row_capacity, part_o, out)
            elif warp < FIRST_SOFTMAX_WARP:
                score_role(batch, block, share, i32(warp - FIRST_SCORE_WARP), q, q_token_stride, q_head_stride)
            elif warp < FIRST_COPY_WARP:
                softmax_role(batch, block, share, i32(warp - FIRST_SOFTMAX_WARP), scale, row_capacity, part_lse, lse)
            elif COPY_WARPS == 2:
                copy_role(batch, block, share, i32(1), k, k_stride, pool, pool_stride)

    return verify_kernel
