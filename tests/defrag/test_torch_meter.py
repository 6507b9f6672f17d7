"""The device form of the metric equals the NumPy one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sglang_glue.defrag import torch_meter
from sglang_glue.defrag.runs import BUCKETS, EMPTY, row_stats

rows_of_slots = st.lists(st.lists(st.integers(0, 12), min_size=0, max_size=30), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(rows_of_slots, st.sampled_from([torch.int32, torch.int64]))
def test_equal_to_numpy(rows: list[list[int]], dtype: torch.dtype) -> None:
    width = max(len(r) for r in rows)
    block = torch.full((len(rows), width), 5, dtype=dtype)  # stale entries behind each row must not count
    for i, row in enumerate(rows):
        block[i, : len(row)] = torch.tensor(row, dtype=dtype)
    got = torch_meter.start(block, torch.tensor([len(r) for r in rows])).stats()
    want = row_stats([np.array(r, np.int64) for r in rows])
    assert (got.tokens, got.runs, got.longest) == (want.tokens, want.runs, want.longest)
    assert got.mean == pytest.approx(want.mean)
    assert got.histogram == want.histogram
    assert got.typical == max((b for b in BUCKETS if b <= want.typical), default=0)


def test_long_runs_and_empty_blocks() -> None:
    block = torch.arange(1, 100_001)[None]
    stats = torch_meter.start(block, torch.tensor([100_000])).stats()
    assert (stats.runs, stats.longest, stats.typical) == (1, 100_000, BUCKETS[-1])
    assert torch_meter.start(block[:, :0], torch.tensor([0])).stats() == EMPTY
    assert torch_meter.start(block, torch.tensor([0])).stats() == EMPTY


@pytest.mark.gpu
def test_a_reading_is_taken_without_a_synchronisation() -> None:
    block = torch.arange(1, 4097, device="cuda").reshape(4, 1024)
    lengths = torch.full((4,), 1024, device="cuda")
    torch_meter.start(block, lengths).stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reading = torch_meter.start(block, torch_meter.upload([1024] * 4, block.device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reading.stats().runs == 4
