"""The slot on a GPU: inside CUDA graphs, without a synchronisation, and with pinned captures."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from captured_tensors import load_case
from sglang_glue.board import Board
from sglang_glue.counters import Counters
from sglang_glue.diffstats import DiffStats
from sglang_glue.settings import Mode
from tests.glue.fakes import attend, make_call, make_facts
from tests.glue.slots import THRESHOLD, make_slot
from tests.glue.test_capture import batch_for, settings_for, settled
from verify_numba import Verifier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]

T, H = 4, 2


def on_gpu(call):
    return call._replace(**{k: v.cuda() for k, v in call._asdict().items() if isinstance(v, torch.Tensor)})


def gpu_calls(count, lengths=(5, 9)):
    return [on_gpu(make_call(lengths, T, H, seed=seed)) for seed in range(count)]


def reference(call):
    out = torch.empty_like(call.o)
    attend(call, out)
    return out


def gpu_slot(mode, calls, **more):
    """A slot over the real kernels; Triton's part copies the float32 reference, which a graph can hold."""
    board = Board(len(calls) + 1, "cuda")
    verifier = Verifier(max_bs=8, T=T, H=H, device="cuda:0")
    verifier.warmup()
    wanted = {call.k_buffer.data_ptr(): reference(call) for call in calls}
    return make_slot(
        mode,
        calls=calls,
        verifier=verifier,
        board=board,
        counters=Counters(list(range(len(calls))), board),
        stats=DiffStats(board, THRESHOLD),
        triton=lambda call, out: out.copy_(wanted[call.k_buffer.data_ptr()]),
        **{"in_graph": torch.cuda.is_current_stream_capturing, **more},
    )


def captured(slot, calls, after_each=lambda: None):
    """The calls of one step as a graph, after the eager warm-up that SGLang does too."""
    for call in calls:
        assert slot(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            assert slot(*call)
            after_each()
    return graph


class Reader(threading.Thread):
    """Reads a slot's counters again and again. Its pauses leave the GIL to the thread that captures: without them each
    of that thread's few hundred calls into torch would wait for it, for many milliseconds where the CPUs are busy."""

    PAUSE_S, LIMIT_S = 0.001, 60.0

    def __init__(self, slot):
        super().__init__(daemon=True)
        self._slot, self._stop_it, self.reads = slot, threading.Event(), 0

    def run(self):
        while not self._stop_it.wait(self.PAUSE_S):
            self._slot.counters.snapshot()
            self.reads += 1

    def wait_for_a_whole_read(self):
        """Returns after a read that began after this call."""
        wanted, deadline = self.reads + 2, time.monotonic() + self.LIMIT_S
        while self.reads < wanted:
            assert self.is_alive() and time.monotonic() < deadline
            time.sleep(self.PAUSE_S)

    def stop(self):
        self._stop_it.set()
        self.join(self.LIMIT_S)


@pytest.mark.parametrize("mode", [Mode.ON, Mode.VALIDATE])
def test_a_graph_serves_and_counts_every_replay(mode):
    calls = gpu_calls(3)
    slot = gpu_slot(mode, calls)
    graph = captured(slot, calls)
    eager = [call.o.clone() for call in calls]
    for call in calls:
        call.o.fill_(float("nan"))
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(call.o, before) for call, before in zip(calls, eager, strict=True))
    snapshot = slot.counters.snapshot()
    assert snapshot["errors"] == {} and snapshot["steps"] == {"eager": 1, "graph": 5}
    assert snapshot["eager_calls"] == 3 and snapshot["graph_calls"] == 15
    if mode is Mode.VALIDATE:
        graph_stats = snapshot["validate"]["graph"]
        assert graph_stats["calls"] == 15 and graph_stats["mismatches"] == 0
        assert 0 < graph_stats["relative_norm"] < 4e-3


def test_a_mismatch_inside_a_graph_is_seen_and_placed():
    calls = gpu_calls(2)
    slot = gpu_slot(Mode.VALIDATE, calls)
    graph = captured(slot, calls)
    calls[1].q.mul_(-1)  # the reference was taken before
    graph.replay()
    torch.cuda.synchronize()
    (found,) = slot.counters.snapshot()["validate"]["recent_mismatches"]
    assert found["tag"] == "graph" and found["layer"] == 1 and found["bs"] == 2 and found["prefix"] in (5, 9)


def test_padding_inside_a_graph_is_left_out():
    calls = gpu_calls(1, lengths=(5, 1))
    slot = gpu_slot(Mode.VALIDATE, calls)
    graph = captured(slot, calls)
    calls[0].kv_indices[5] = 0
    calls[0].q[T:] = 7.0
    graph.replay()
    torch.cuda.synchronize()
    graph_stats = slot.counters.snapshot()["validate"]["graph"]
    assert graph_stats["rows"] == T and graph_stats["mismatches"] == 0


@pytest.mark.parametrize("mode", [Mode.ON, Mode.VALIDATE])
def test_serving_synchronises_nowhere(mode):
    calls = gpu_calls(2)
    slot = gpu_slot(mode, calls)
    for call in calls:
        slot(*call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            assert slot(*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert slot.counters.snapshot()["errors"] == {}


def test_reading_while_a_graph_is_captured_does_not_disturb_it():
    calls = gpu_calls(2)
    slot = gpu_slot(Mode.VALIDATE, calls)
    reader = Reader(slot)
    reader.start()
    try:
        # In the mode in which any CUDA call of another thread ends the capture.
        graph = captured(slot, calls, after_each=reader.wait_for_a_whole_read)
        graph.replay()
        torch.cuda.synchronize()
    finally:
        reader.stop()
    assert not reader.is_alive()
    assert slot.counters.snapshot()["steps"]["graph"] == 1


def test_a_captured_case_is_whole_although_the_buffers_change_at_once(tmp_path):
    from sglang_glue.backend import CurrentBatch
    from sglang_glue.capture import Capture

    calls = gpu_calls(1)
    facts = make_facts(device="cuda:0", layer_of={calls[0].k_buffer.data_ptr(): 0})
    current = CurrentBatch()
    capture = Capture(settings_for(tmp_path), facts, current)
    slot = gpu_slot(Mode.ON, calls, capture=capture)
    batch = batch_for(calls[0])
    current.forward_batch = batch
    for name in ("out_cache_loc", "req_pool_indices", "positions"):
        setattr(batch, name, getattr(batch, name).cuda())
    q = calls[0].q.clone()
    torch.cuda._sleep(200_000_000)  # the copies are enqueued long before they run
    assert slot(*calls[0])
    calls[0].q.fill_(3.0)
    calls[0].k_buffer.fill_(3.0)
    assert settled(capture, 1) == {"written": 1}
    case = load_case(next(tmp_path.iterdir()))
    assert torch.equal(torch.from_numpy(case.q.view("int16").copy()), q.view(torch.int16).cpu())
