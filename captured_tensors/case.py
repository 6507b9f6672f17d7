"""One captured verify step as typed, frozen NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from captured_tensors.meta import CaptureMeta
from captured_tensors.schema import TENSORS, Array, check_case


@dataclass(frozen=True, eq=False)
class CaptureCase:
    """One verify step of one layer, as it entered SGLang's attention backend.

    ``bs`` requests, ``N`` draft tokens, ``H`` heads, ``P = kv_indptr[bs]`` prefix tokens. The arrays are
    checked against the schema and become read-only. bf16 is ``ml_dtypes.bfloat16``.

    Raises:
        CaptureError: a tensor breaks the schema.
    """

    name: str
    meta: CaptureMeta
    q: Array
    """[N, H, 576] bf16, absorbed queries."""
    k: Array
    """[N, 1, 576] bf16, latents of the draft tokens."""
    v: Array
    """[N, 1, 512] bf16, the first 512 columns of ``k``."""
    qo_indptr: Array
    """[bs + 1] int32 or int64, draft rows of request b are qo_indptr[b] to qo_indptr[b + 1]."""
    kv_indptr: Array
    """[bs + 1] int32 or int64, prefix only."""
    kv_indices: Array
    """[>= P] int32 or int64 pool slots; entries from P on are stale."""
    custom_mask: Array | None
    """Flat bool or uint8, laid out as ``meta.mask_layout`` says; None for CHAIN."""
    mask_indptr: Array | None
    """[bs + 1] int32 or int64, entries 0..bs-1 are the starts in ``custom_mask``; None for CHAIN."""
    out_cache_loc: Array
    """[N] int32 or int64, pool slots that the draft tokens were written to."""
    seq_lens: Array
    """[bs] int32 or int64, prefix lengths."""
    req_pool_indices: Array
    """[bs] int32 or int64."""
    positions: Array
    """[N] int32 or int64, sequence positions of the draft tokens."""
    prefix_rows: Array
    """[P, 1, 576] bf16, pool rows at kv_indices[:P]."""
    tail_rows: Array
    """[N, 1, 576] bf16, pool rows at out_cache_loc."""
    out_triton: Array | None = None
    """[N, H * 512] bf16, what SGLang's Triton kernel returned; None where it was not recorded."""

    def __post_init__(self) -> None:
        tensors = self.tensors()
        check_case(tensors, self.meta)
        for name, array in tensors.items():
            # A view: the caller's own array keeps its flag.
            frozen = array.view()
            frozen.flags.writeable = False
            object.__setattr__(self, name, frozen)

    def tensors(self) -> dict[str, Array]:
        """The recorded arrays by schema name."""
        names = (f.name for f in fields(self) if f.name in TENSORS)
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def bs(self) -> int:
        """Requests in the batch."""
        return len(self.qo_indptr) - 1

    @property
    def N(self) -> int:
        """Draft tokens in the batch."""
        return int(self.qo_indptr[-1])

    @property
    def T(self) -> int:
        """Draft budget of a request, root included."""
        return self.meta.max_extend_len

    @property
    def H(self) -> int:
        """Query heads."""
        return self.meta.num_heads

    @property
    def prefix_lengths(self) -> tuple[int, ...]:
        """L of each request."""
        return tuple(np.diff(self.kv_indptr).tolist())

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Draft tokens of each request, each at most ``T``."""
        return tuple(np.diff(self.qo_indptr).tolist())

    def rows_of(self, b: int) -> slice:
        """Where request ``b`` lies in q, k, v, out_cache_loc, positions, tail_rows and out_triton."""
        return slice(int(self.qo_indptr[b]), int(self.qo_indptr[b + 1]))

    def prefix_of(self, b: int) -> slice:
        """Where request ``b`` lies in kv_indices and prefix_rows."""
        return slice(int(self.kv_indptr[b]), int(self.kv_indptr[b + 1]))

    def tree_mask(self, b: int) -> Array:
        """[T_b, T_b] bool: cell (i, j) says whether draft token i of request ``b`` sees draft token j."""
        t, prefix = self.draft_lengths[b], self.prefix_lengths[b]
        if self.custom_mask is None or self.mask_indptr is None:
            return np.tri(t, dtype=np.bool_)
        skipped = prefix if self.meta.mask_layout == "FULL_MASK" else 0
        start = int(self.mask_indptr[b])
        cells = self.custom_mask[start : start + t * (skipped + t)]
        return cells.reshape(t, skipped + t)[:, skipped:].astype(np.bool_)
