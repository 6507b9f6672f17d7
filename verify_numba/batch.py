"""What one verify step consists of."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from verify_numba.kernels.work import CHAIN, FULL_MASK, PREFIX, QLEN_ONLY, TAIL

Array = Any
"""A NumPy array (bf16 as `ml_dtypes.bfloat16`) or a torch tensor."""


class MaskLayout(enum.Enum):
    """Where the cell (i, j) of request b's tree mask lies: does draft token i see draft token j?"""

    FULL_MASK = FULL_MASK
    """mask_indptr[b] + i * (L_b + T_b) + L_b + j: SGLang's layout. Its prefix columns are not read."""
    QLEN_ONLY = QLEN_ONLY
    """mask_indptr[b] + i * T_b + j."""
    CHAIN = CHAIN
    """No mask: token i sees tokens 0..i."""


class Parts(enum.Enum):
    """Which keys take part. PREFIX and TAIL give that part's own out and lse, ready for a merge."""

    PREFIX = PREFIX
    TAIL = TAIL
    ALL = PREFIX | TAIL


@dataclass(frozen=True, eq=False)
class VerifyBatch:
    """The tensors of one verify step (docs/design.md has the alphabet).

    q           [N, H, D_QK] bf16, the absorbed queries; any token and head stride, last dimension contiguous
    k           [N, 1, D_QK] bf16, the draft tokens' latent rows
    kv_pool     [slots, 1, D_QK] bf16, the paged latent cache with page size 1
    qo_indptr   [bs + 1] int32 or int64: request b's draft tokens are [qo_indptr[b], qo_indptr[b + 1])
    kv_indptr   [bs + 1] int32 or int64: its prefix is kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
    kv_indices  [>= kv_indptr[bs]] int32 or int64 slots; entries behind the last request's are never read
    custom_mask flat, bool or uint8, as `mask_layout` says; None for CHAIN
    mask_indptr [>= bs] int32 or int64, where each request's mask starts; None for CHAIN
    sm_scale    what q . k is multiplied by before the softmax
    """

    q: Array
    k: Array
    kv_pool: Array
    qo_indptr: Array
    kv_indptr: Array
    kv_indices: Array
    custom_mask: Array | None
    mask_indptr: Array | None
    sm_scale: float
    mask_layout: MaskLayout = MaskLayout.FULL_MASK
