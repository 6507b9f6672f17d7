"""The capture writer: what it writes `load_case` takes, and what goes wrong leaves no half case behind."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from captured_tensors import load_case
from sglang_glue import capture_writer
from sglang_glue.backend import CurrentBatch, version_of
from sglang_glue.capture import Capture
from sglang_glue.capture_writer import to_numpy
from sglang_glue.settings import CaptureSettings, CaptureWhen, Mode
from tests.glue.fakes import FakeVerifier, attend, make_call, make_facts
from tests.glue.slots import layers, make_slot


def settings_for(folder, **changes):
    defaults = {"layers": None, "every": 1, "when": CaptureWhen.ALL, "max_prefix": 1000, "max_bytes": 10**9}
    return CaptureSettings(folder=folder, **{**defaults, **changes})


def batch_for(call):
    """The parts of a ForwardBatch that a case needs; the draft rows are written to the pool as SGLang does."""
    free = sorted(set(range(1, call.k_buffer.shape[0])) - set(call.kv_indices.tolist()))
    loc = torch.tensor(free[: call.q.shape[0]])
    call.k_buffer[loc] = call.k
    lengths = (call.kv_indptr[1:] - call.kv_indptr[:-1]).long().cpu()
    positions = lengths.repeat_interleave(call.max_extend_len) + torch.arange(call.max_extend_len).repeat(call.bs)
    return SimpleNamespace(out_cache_loc=loc, req_pool_indices=torch.arange(call.bs) + 1, positions=positions)


def capturing(calls, folder, **changes):
    facts = make_facts(layer_of={call.k_buffer.data_ptr(): 10 + i for i, call in enumerate(calls)})
    current = CurrentBatch()
    return Capture(settings_for(folder, **changes), facts, current), current


def serve(slot, current, calls):
    for call in calls:
        current.forward_batch = batch_for(call)
        assert slot(*call)


def settled(capture, total):
    """The counts, once `total` sampled calls are accounted for."""
    deadline = time.monotonic() + 20
    while sum(capture.counts().values()) < total:
        assert time.monotonic() < deadline, capture.counts()
        time.sleep(0.01)
    return capture.counts()


@pytest.mark.parametrize("mode", [Mode.VALIDATE, Mode.ON])
@pytest.mark.parametrize("tree", [True, False])
def test_a_case_holds_the_call_bit_for_bit(tmp_path, mode, tree):
    (call,) = calls = layers(1, tree=tree)
    capture, current = capturing(calls, tmp_path)
    slot = make_slot(mode, calls=calls, capture=capture, verifier=FakeVerifier(offset=1.0))
    serve(slot, current, calls)
    assert settled(capture, 1) == {"written": 1}
    (path,) = tmp_path.iterdir()
    case = load_case(path)
    assert case.meta.mask_layout == ("FULL_MASK" if tree else "CHAIN")
    assert (case.meta.layer_id, case.meta.num_heads, case.meta.max_extend_len) == (10, 2, 4)
    assert case.meta.model == "DeepseekV3ForCausalLM, 4 layers"
    assert case.meta.torch == torch.__version__ and case.meta.triton == version_of("triton")
    assert case.meta.sm_scale == call.sm_scale and case.meta.extra["rank"] == "tp0"
    for name in ("q", "k", "v", "kv_indptr", "qo_indptr"):
        assert np.array_equal(getattr(case, name).view(np.uint8), to_numpy(getattr(call, name)).view(np.uint8)), name
    triton = torch.empty_like(call.o)
    attend(call, triton)  # Triton's output also where ours was served
    assert np.array_equal(case.out_triton.view(np.uint16), to_numpy(triton.reshape(8, -1)).view(np.uint16))


def test_stale_tails_are_kept_but_short(tmp_path):
    calls = layers(1)
    calls[0] = calls[0]._replace(kv_indices=torch.cat([calls[0].kv_indices, torch.full((900,), -1)]))
    capture, current = capturing(calls, tmp_path)
    serve(make_slot(Mode.ON, calls=calls, capture=capture), current, calls)
    settled(capture, 1)
    case = load_case(next(tmp_path.iterdir()))
    assert len(case.prefix_rows) == 14 and 14 < len(case.kv_indices) <= 14 + 64


def test_sampling_by_layer_and_step(tmp_path):
    calls = layers(3)
    capture, current = capturing(calls, tmp_path, layers=frozenset({11}), every=3)
    slot = make_slot(Mode.ON, calls=calls, capture=capture)
    for _ in range(7):  # steps 1, 4 and 7 are sampled
        serve(slot, current, calls)
        settled(capture, len(list(tmp_path.iterdir())))
        time.sleep(0.05)
    assert settled(capture, 3) == {"written": 3}
    assert {load_case(path).meta.layer_id for path in tmp_path.iterdir()} == {11}


def test_graph_calls_are_never_captured(tmp_path):
    calls = layers(1)
    capture, current = capturing(calls, tmp_path)
    serve(make_slot(Mode.ON, calls=calls, capture=capture, in_graph=lambda: True), current, calls)
    assert capture.counts() == {} and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("offset", "outcome"), [(0.0, "agrees"), (1.0, "written")])
def test_only_mismatches(tmp_path, offset, outcome):
    calls = layers(1)
    capture, current = capturing(calls, tmp_path, when=CaptureWhen.MISMATCH)
    slot = make_slot(Mode.VALIDATE, calls=calls, capture=capture, verifier=FakeVerifier(offset=offset))
    serve(slot, current, calls)
    assert settled(capture, 1) == {outcome: 1}
    assert len(list(tmp_path.iterdir())) == (outcome == "written")


def test_a_prefix_over_the_limit_is_dropped(tmp_path):
    calls = layers(1)
    capture, current = capturing(calls, tmp_path, max_prefix=13)
    serve(make_slot(Mode.ON, calls=calls, capture=capture), current, calls)
    assert settled(capture, 1) == {"too_long": 1} and not list(tmp_path.iterdir())


def test_a_dummy_batch_of_the_sink_is_dropped(tmp_path):
    calls = layers(1)
    calls[0].kv_indices[:14] = 0
    capture, current = capturing(calls, tmp_path)
    serve(make_slot(Mode.ON, calls=calls, capture=capture), current, calls)
    assert settled(capture, 1) == {"padding": 1} and not list(tmp_path.iterdir())


def test_the_byte_limit_counts_what_is_there(tmp_path):
    calls = layers(1)
    (tmp_path / "earlier.safetensors").write_bytes(bytes(80_000))
    capture, current = capturing(calls, tmp_path, max_bytes=100_000)  # a case of this call has some 70 kB
    slot = make_slot(Mode.ON, calls=calls, capture=capture)
    serve(slot, current, calls)
    assert settled(capture, 1) == {"limit": 1}
    serve(slot, current, calls)  # closed: not even sampled
    assert capture.counts() == {"limit": 1} and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_stops_capturing_and_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    calls = layers(1)
    capture, current = capturing(calls, tmp_path)
    slot = make_slot(Mode.ON, calls=calls, capture=capture)
    serve(slot, current, calls)
    assert settled(capture, 1) == {"disk": 1}
    assert not list(tmp_path.iterdir())
    serve(slot, current, calls)
    assert capture.counts() == {"disk": 1} and slot.counters.snapshot()["eager_calls"] == 2


def test_no_call_waits_for_the_disk(tmp_path, monkeypatch):
    save, disk = capture_writer.save_case, threading.Event()

    def waits_for_the_disk(*args, **kwargs):
        assert disk.wait(60)
        save(*args, **kwargs)

    monkeypatch.setattr(capture_writer, "save_case", waits_for_the_disk)
    calls = layers(1)
    capture, current = capturing(calls, tmp_path)
    slot = make_slot(Mode.ON, calls=calls, capture=capture)
    for _ in range(5):  # a call that waited would wait for ever: the disk comes back only afterwards
        serve(slot, current, calls)
    assert not list(tmp_path.glob("*.safetensors"))
    disk.set()
    assert settled(capture, 5) == {"written": 2, "busy": 3}


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    import captured_tensors.store as store
    real = os.replace
    store.os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)  # dies with the file written, not renamed
    from sglang_glue.settings import Mode
    from tests.glue.slots import layers, make_slot
    from tests.glue.test_capture import capturing, serve, settled
    calls = layers(1)
    capture, current = capturing(calls, Path({folder!r}))
    serve(make_slot(Mode.ON, calls=calls, capture=capture), current, calls)
    settled(capture, 1)
"""


def test_a_killed_writer_leaves_no_case(tmp_path):
    root = os.getcwd()
    code = textwrap.dedent(KILLED.format(root=root, folder=str(tmp_path)))
    died = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert len(list(tmp_path.iterdir())) == 1  # the partial file, under a name that nothing reads


def test_the_batch_is_known_only_while_forward_extend_runs():
    class Backend:
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            return current.forward_batch, save_kv_cache

    current, backend = CurrentBatch(), Backend()
    current.watch(backend)
    assert backend.forward_extend(1, 2, 3, "layer", "batch", save_kv_cache=False) == ("batch", False)
    assert current.forward_batch is None
    assert "forward_extend" not in vars(Backend()) and Backend().forward_extend(1, 2, 3, 4, "x") == (
        None,
        True,
    )


def test_without_a_batch_the_call_is_skipped(tmp_path):
    calls = [make_call()]
    capture, _ = capturing(calls, tmp_path)
    assert make_slot(Mode.ON, calls=calls, capture=capture)(*calls[0])
    assert capture.counts() == {"no_batch": 1}
