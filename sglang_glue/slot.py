"""The function in SGLang's verify slot: decline, run, compare, and never take the server down."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_glue.backend import SlotCall
from sglang_glue.board import Board, Tag
from sglang_glue.counters import Counters
from sglang_glue.diffstats import DiffStats
from sglang_glue.eligibility import RANK_FALLBACK, Limits, call_decline
from sglang_glue.ranks import RanksApart
from sglang_glue.settings import Mode
from verify_numba import MaskLayout, VerifyBatch

if TYPE_CHECKING:
    from sglang_glue.capture import Capture
    from sglang_glue.ranks import FallbackFlag
    from verify_numba import Verifier

log = logging.getLogger(__name__)


def capturing_graph() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def batch_of(call: SlotCall) -> VerifyBatch:
    """The slot's arguments in the terms of `verify_numba`; nothing is copied."""
    tree = call.custom_mask is not None
    return VerifyBatch(
        q=call.q,
        k=call.k,
        kv_pool=call.k_buffer,
        qo_indptr=call.qo_indptr,
        kv_indptr=call.kv_indptr,
        kv_indices=call.kv_indices,
        custom_mask=call.custom_mask,
        mask_indptr=call.mask_indptr if tree else None,
        sm_scale=call.sm_scale,
        mask_layout=MaskLayout.FULL_MASK if tree else MaskLayout.CHAIN,
    )


@dataclass
class VerifySlot:
    """Called in place of SGLang's split-KV verify kernel; True means that `o` is written."""

    mode: Mode
    verifier: Verifier
    limits: Limits
    rows: dict[int, int]  # address of a layer's key buffer -> its row on the board
    board: Board
    counters: Counters
    stats: DiffStats
    triton: Callable[[SlotCall, Any], None]
    occupant: Callable[..., bool] | None  # SGLang's own, asked where we decline
    capture: Capture | None = None
    ranks: FallbackFlag | None = None  # None: this rank is the only one
    in_graph: Callable[[], bool] = capturing_graph

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        try:
            served = self._serve(SlotCall(*args, **kwargs))
        except RanksApart:
            raise
        except Exception as error:  # noqa: BLE001 - a fault of ours must not reach the server
            served = self._fall_back(error)
        if served or self.occupant is None:
            return served
        return self.occupant(*args, **kwargs)

    def _serve(self, call: SlotCall) -> bool:
        tag = Tag.GRAPH if self.in_graph() else Tag.EAGER
        reason = call_decline(call, self.limits) or self._rank_decline(tag)
        if reason is not None:
            self.counters.decline(tag, reason)
            return False
        row = self.rows.get(call.k_buffer.data_ptr(), len(self.rows))
        if row == 0:
            self.board.count_step(tag)
        mismatch = None
        if self.mode is Mode.VALIDATE:
            mismatch = self._validate(call, tag, row)
        else:
            self.verifier.verify(batch_of(call), call.o)
        self.counters.ours(tag, row, call.bs)
        if row >= len(self.rows) - 1:
            self.board.publish()
        if self.capture is not None and tag is Tag.EAGER:
            self._offer(self.capture, call, row, mismatch)
        return True

    def _validate(self, call: SlotCall, tag: Tag, row: int) -> torch.Tensor:
        ours = torch.empty_like(call.o)
        self.verifier.verify(batch_of(call), ours)
        self.triton(call, call.o)
        return self.stats.add(tag, row, call, ours, call.o)

    def _offer(self, capture: Capture, call: SlotCall, row: int, mismatch: torch.Tensor | None) -> None:
        # What fails here must not undo a verify step that has already been served.
        try:
            capture.offer(call, row, mismatch, lambda: self._triton_output(call))
        except Exception as error:  # noqa: BLE001 - counted and logged, and the step is served
            self._report(error, "a call cannot be captured")

    def _triton_output(self, call: SlotCall) -> torch.Tensor:
        if self.mode is Mode.VALIDATE:
            return call.o
        out = torch.empty_like(call.o)
        self.triton(call, out)
        return out

    def _rank_decline(self, tag: Tag) -> str | None:
        """The rule of `sglang_glue.ranks`: where one rank fell back, all do, and a graph is not captured any more."""
        if self.ranks is None or not self.ranks.is_raised:
            return None
        if tag is Tag.GRAPH:
            raise RanksApart(f"verify-numba: {self.ranks.message}, before all CUDA graphs were captured")
        return RANK_FALLBACK

    def _fall_back(self, error: Exception) -> bool:
        """The one place where this rank gives a step back to Triton that it was asked to serve."""
        self._report(error, "an error of ours, Triton serves the step instead")
        if self.ranks is not None:
            self.ranks.raise_it(error)
            if self.in_graph():
                raise RanksApart(
                    f"verify-numba: {self.ranks.message}, while a CUDA graph was captured: this rank alone would run"
                    " Triton in it for good. Start with KDTREE_VERIFY=off, or without CUDA graphs"
                ) from error
        return False

    def _report(self, error: Exception, what: str) -> None:
        if self.counters.error(type(error).__name__):
            log.error("verify-numba: %s (logged once a kind)", what, exc_info=error)
