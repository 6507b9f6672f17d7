"""Compare our output with Triton's on the device, inside a CUDA graph too: no synchronisation, no host value read.

Rows of padded requests are left out. A graph is padded with requests whose only prefix slot is 0, the sink that no
real token ever owns; the content of their mask is undefined, so the two kernels may rightly differ there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from sglang_glue.backend import SlotCall
from sglang_glue.board import MISMATCH, RING, STATS, Board, Tag

_SUMS = slice(STATS.index("calls"), STATS.index("max_abs"))
_MAX_ABS, _MAX_REL = STATS.index("max_abs"), STATS.index("max_rel")
_WORST = slice(STATS.index("worst_prefix"), STATS.index("worst_bs") + 1)


class DiffStats:
    """Adds calls to the statistics of a `Board`.

    Args:
        threshold: relative norm of a call's difference from which it counts as a mismatch.
    """

    def __init__(self, board: Board, threshold: float) -> None:
        self._board = board
        self._threshold = threshold

    def add(self, tag: Tag, layer: int, call: SlotCall, ours: Tensor, triton: Tensor) -> Tensor:
        """Enqueue the comparison of `ours` with `triton` ([N, H, D_V] bf16 each) for row `layer` of the board.

        A call whose requests are all padding compares nothing and is not counted: SGLang makes such calls while it
        starts. Returns a device scalar (bool): whether the call is a mismatch.
        """
        diff, norm, finite_ours, finite_triton, largest = _by_row(ours, triton)
        live = _live_rows(call)
        both = live & finite_ours & finite_triton
        rel, max_abs, sq_diff, sq_triton = _totals(diff, norm, largest, both)
        nan_ours = (live & ~finite_ours).sum()
        mismatch = (rel >= self._threshold) | (nan_ours > 0)
        worst = torch.where(both, largest, -1).argmax()
        lengths = call.kv_indptr[1:] - call.kv_indptr[:-1]
        prefix = lengths.index_select(0, (worst // call.max_extend_len).view(1))[0]  # [scalar] would synchronise
        one = torch.ones_like(rel)
        sums = (live.any(), live.sum(), mismatch, sq_diff, sq_triton, nan_ours, (live & ~finite_triton).sum())
        self._accumulate(self._board.stats[tag, layer], _row(sums), rel, max_abs, _row((prefix, one * call.bs)))
        self._remember(mismatch, _row((one * tag, one * layer, one * call.bs, prefix, rel, max_abs)))
        return mismatch

    def _accumulate(self, row: Tensor, sums: Tensor, rel: Tensor, max_abs: Tensor, worst: Tensor) -> None:
        row[_WORST] = torch.where(rel > row[_MAX_REL], worst, row[_WORST])
        row[_SUMS] += sums
        row[_MAX_ABS] = torch.maximum(row[_MAX_ABS], max_abs)
        row[_MAX_REL] = torch.maximum(row[_MAX_REL], rel)

    def _remember(self, mismatch: Tensor, record: Tensor) -> None:
        assert record.numel() == len(MISMATCH)
        count = self._board.stats[..., STATS.index("mismatches")].sum()
        at = ((count - 1).clamp_min(0) % RING).long().view(1)
        ring = self._board.ring
        ring.index_copy_(0, at, torch.where(mismatch, record, ring.index_select(0, at)[0]).unsqueeze(0))


def _by_row(ours: Tensor, triton: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """By draft token: norm of the difference, of Triton's row, whether each is finite, largest difference."""
    diff = ours.float().sub_(triton)  # the one full-size temporary
    dims = (1, 2)
    norm = vector_norm(triton, dim=dims, dtype=torch.float32)
    finite_ours = vector_norm(ours, dim=dims, dtype=torch.float32).isfinite()
    return (
        vector_norm(diff, dim=dims),
        norm,
        finite_ours,
        norm.isfinite(),
        vector_norm(diff, float("inf"), dim=dims),
    )


def _totals(diff: Tensor, norm: Tensor, largest: Tensor, use: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sq_diff = torch.where(use, diff, 0).double().square().sum()
    sq_triton = torch.where(use, norm, 0).double().square().sum()
    # An all-zero reference with any difference is an infinite relative norm; equal is 0.
    rel = torch.where(sq_diff > 0, (sq_diff / sq_triton).sqrt(), 0)
    return rel, torch.where(use, largest, 0).max().double(), sq_diff, sq_triton


def _live_rows(call: SlotCall) -> Tensor:
    """[N] bool: the row belongs to a request that is not padding."""
    slots = call.kv_indices
    if slots.numel() == 0:  # every prefix is empty, and padding has a prefix of one
        return torch.ones(call.q.shape[0], dtype=torch.bool, device=call.q.device)
    starts, ends = call.kv_indptr[:-1].long(), call.kv_indptr[1:].long()
    first = slots[starts.clamp_max(slots.numel() - 1)]
    padding = (ends > starts) & (first == 0)
    return (~padding).repeat_interleave(call.max_extend_len, output_size=call.q.shape[0])


def _row(values: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([value.double() for value in values])
