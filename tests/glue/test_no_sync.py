"""Nothing on the serving path reads a value from the device: on the CPU such a read shows in the dispatcher."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_glue.board import Board, Tag
from sglang_glue.diffstats import DiffStats
from sglang_glue.eligibility import Limits, call_decline
from sglang_glue.settings import Mode
from sglang_glue.slot import batch_of
from tests.glue.fakes import make_call
from tests.glue.slots import layers, make_slot
from tests.glue.test_capture import batch_for, capturing

READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_to_copy.cpu")


class NoReads(TorchDispatchMode):
    """Fails where an operation would have to wait for the device to know a value or a size."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        assert name not in READS and not by_mask, f"{name} reads from the device"
        return function(*args, **(kwargs or {}))


class Untouched:
    """Serves nothing: the kernels are not what is looked at here."""

    plan = "none"

    def verify(self, batch, out, lse=None):
        out.fill_(1)


@pytest.mark.parametrize("probe", [lambda t: t[0].item(), lambda t: torch.arange(3)[t[0]], lambda t: t[t > 1]])
def test_the_detector_detects(probe):
    with pytest.raises(AssertionError, match="reads from the device"), NoReads():
        probe(torch.arange(3))


@pytest.mark.parametrize("lengths", [(5, 9), (0,)])
@pytest.mark.parametrize("tree", [True, False])
def test_statistics_read_nothing(lengths, tree):
    call, board = make_call(lengths, tree=tree), Board(2, "cpu")
    stats = DiffStats(board, 0.01)
    ours, triton = torch.ones_like(call.o), torch.zeros_like(call.o)
    with NoReads():
        stats.add(Tag.GRAPH, 0, call, ours, triton)
        board.count_step(Tag.GRAPH)
        board.publish()
    assert board.read().steps.tolist() == [0, 1]


def test_eligibility_and_marshaling_read_nothing():
    call = make_call()
    with NoReads():
        assert call_decline(call, Limits(8, 4, 2)) is None
        batch_of(call)


@pytest.mark.parametrize("mode", [Mode.ON, Mode.VALIDATE])
def test_a_served_and_captured_call_reads_nothing(tmp_path, mode):
    calls = layers(1)
    capture, current = capturing(calls, tmp_path)
    slot = make_slot(mode, calls=calls, verifier=Untouched(), capture=capture, triton=lambda call, out: out.zero_())
    current.forward_batch = batch_for(calls[0])
    with NoReads():
        assert slot(*calls[0])
    assert slot.counters.snapshot()["errors"] == {}
