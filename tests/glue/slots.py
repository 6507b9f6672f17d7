"""A `VerifySlot` over the stand-in kernels."""

from __future__ import annotations

from sglang_glue.backend import SlotCall
from sglang_glue.board import Board
from sglang_glue.counters import Counters
from sglang_glue.diffstats import DiffStats
from sglang_glue.eligibility import Limits
from sglang_glue.settings import Mode
from sglang_glue.slot import VerifySlot
from tests.glue.fakes import FakeVerifier, attend, make_call

THRESHOLD = 0.01


def make_slot(mode: Mode, *, calls: list[SlotCall], verifier: FakeVerifier | None = None, **more) -> VerifySlot:
    """A slot that knows the pool of each of `calls` as one layer, numbered from 10."""
    board = Board(len(calls) + 1, "cpu")
    rows = {call.k_buffer.data_ptr(): row for row, call in enumerate(calls)}
    defaults = {
        "verifier": verifier or FakeVerifier(),
        "limits": Limits(max_bs=8, T=4, H=2),
        "rows": rows,
        "board": board,
        "counters": Counters([10 + row for row in range(len(calls))], board),
        "stats": DiffStats(board, THRESHOLD),
        "triton": attend,
        "occupant": None,
        "in_graph": lambda: False,
    }
    return VerifySlot(mode=mode, **{**defaults, **more})


def layers(count: int, **kwargs) -> list[SlotCall]:
    """One call a layer; each has its own pool."""
    return [make_call(seed=seed, **kwargs) for seed in range(count)]
