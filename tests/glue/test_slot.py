"""The function in the slot: what it runs, what it returns, and that it never raises."""

import logging

import pytest
import torch

from sglang_glue.settings import Mode
from sglang_glue.slot import batch_of
from tests.glue.fakes import FakeVerifier, attend, make_call
from tests.glue.slots import layers, make_slot
from verify_numba import MaskLayout, Verifier


def expected(call):
    out = torch.empty_like(call.o)
    attend(call, out)
    return out


def test_on_writes_our_output_and_says_so():
    call = make_call()
    slot = make_slot(Mode.ON, calls=[call], verifier=FakeVerifier(offset=1.0))
    assert slot(*call) is True
    torch.testing.assert_close(call.o, expected(call) + 1.0)


def test_validate_runs_both_and_returns_tritons_output():
    call = make_call()
    slot = make_slot(Mode.VALIDATE, calls=[call], verifier=FakeVerifier(offset=1.0))
    assert slot(*call) is True
    assert torch.equal(call.o, expected(call))
    assert slot.counters.snapshot()["validate"]["eager"]["mismatches"] == 1


def test_the_slots_keywords_are_those_of_sglang():
    call = make_call()
    slot = make_slot(Mode.ON, calls=[call])
    keywords = (
        "logit_cap",
        "sliding_window_size",
        "sinks",
        "window_kv_offsets",
        "xai_temperature_len",
        "max_bs",
    )
    assert slot(*call[:16], **{name: getattr(call, name) for name in keywords}) is True


def test_a_declined_call_is_left_untouched_and_counted():
    call = make_call()._replace(logit_cap=30.0)
    slot = make_slot(Mode.ON, calls=[call])
    assert slot(*call) is False
    assert call.o.isnan().all() and not slot.verifier.batches
    assert slot.counters.snapshot()["declines"] == {"eager": {"logit_cap": 1}, "graph": {}}


def test_sglangs_own_occupant_is_asked_where_we_decline():
    call = make_call()._replace(logit_cap=30.0)
    seen = []
    slot = make_slot(Mode.ON, calls=[call], occupant=lambda *args, **kw: seen.append((args, kw)) or True)
    assert slot(*call[:-1], max_bs=7) is True
    assert len(seen[0][0]) == len(call) - 1 and seen[0][1] == {"max_bs": 7}


@pytest.mark.parametrize("mode", [Mode.ON, Mode.VALIDATE])
def test_an_error_of_ours_falls_back_is_counted_and_logged_once(mode, caplog):
    call = make_call()
    slot = make_slot(mode, calls=[call], verifier=FakeVerifier(error=ValueError("q: found 3, expected 4")))
    with caplog.at_level(logging.ERROR):
        assert [slot(*call) for _ in range(3)] == [False] * 3
    snapshot = slot.counters.snapshot()
    assert snapshot["errors"] == {"ValueError": 3} and snapshot["eager_calls"] == 0
    assert len(caplog.records) == 1


def test_arguments_that_changed_their_number_fall_back():
    slot = make_slot(Mode.ON, calls=[make_call()])
    assert slot(*make_call()[:10]) is False
    assert slot.counters.snapshot()["errors"] == {"TypeError": 1}


def test_a_step_is_counted_once_and_a_call_once_a_layer():
    calls = layers(3)
    slot = make_slot(Mode.ON, calls=calls)
    for _ in range(2):
        for call in calls:
            slot(*call)
    snapshot = slot.counters.snapshot()
    assert snapshot["eager_calls"] == 6 and snapshot["steps"] == {"eager": 2, "graph": 0}


def test_graph_calls_follow_executed_steps_not_captures():
    calls = layers(3)
    slot = make_slot(Mode.ON, calls=calls, in_graph=lambda: True)
    for call in calls:  # the capture; on a device it would not execute, here it does
        slot(*call)
    for _ in range(4):  # replays execute the captured step counter and the captured copy alone
        slot.board.count_step(1)
        slot.board.publish()
    snapshot = slot.counters.snapshot()
    assert snapshot["graphs"] == {"2": 3} and snapshot["steps"]["graph"] == 5
    assert snapshot["graph_calls"] == 15 and snapshot["eager_calls"] == 0


def test_a_pool_of_no_known_layer_is_still_served():
    stranger = make_call(seed=9)
    slot = make_slot(Mode.VALIDATE, calls=layers(1), verifier=FakeVerifier(offset=1.0))
    assert slot(*stranger) is True
    assert slot.counters.snapshot()["validate"]["eager"]["worst_layer"] == -1


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
def test_marshaling_copies_nothing(mask_dtype):
    call = make_call(mask_dtype=mask_dtype)
    batch = batch_of(call)
    for theirs, ours in (
        (call.q, batch.q),
        (call.k_buffer, batch.kv_pool),
        (call.custom_mask, batch.custom_mask),
    ):
        assert ours is theirs
    assert batch.mask_layout is MaskLayout.FULL_MASK and batch.sm_scale == call.sm_scale


def test_no_mask_means_a_chain():
    batch = batch_of(make_call(tree=False))
    assert batch.mask_layout is MaskLayout.CHAIN and batch.custom_mask is None and batch.mask_indptr is None


def test_a_failing_capture_does_not_undo_the_step():
    class Broken:
        def offer(self, *args):
            raise RuntimeError("no room")

    call = make_call()
    slot = make_slot(Mode.ON, calls=[call], capture=Broken())
    assert slot(*call) is True
    assert slot.counters.snapshot()["errors"] == {"RuntimeError": 1}


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tree", [True, False])
def test_the_real_kernels_agree_in_validate(tree, index_dtype):
    call = make_call(lengths=(5, 0, 33), tree=tree, index_dtype=index_dtype)
    slot = make_slot(Mode.VALIDATE, calls=[call], verifier=Verifier(max_bs=8, T=4, H=2, device="cpu"))
    assert slot(*call) is True
    snapshot = slot.counters.snapshot()
    assert snapshot["errors"] == {} and snapshot["validate"]["eager"]["mismatches"] == 0
    assert 0 < snapshot["validate"]["eager"]["relative_norm"] < 4e-3
