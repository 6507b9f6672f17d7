"""One of two ranks of `test_glue_ranks.py`, in a process of its own.

`python -m tests.glue.rank_process RANK FOLDER SCENE` prints one JSON line. The ranks meet in a gloo group over a
file; `at("name")` lines them up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from sglang_glue.backend import CurrentBatch
from sglang_glue.capture import Capture
from sglang_glue.ranks import FallbackFlag, RanksApart, agreed_reason
from sglang_glue.settings import Mode
from sglang_glue.status import StatusFile
from tests.glue.fakes import FakeVerifier, make_call, make_facts
from tests.glue.slots import make_slot
from tests.glue.test_capture import batch_for, settings_for, settled
from tests.glue.test_status import report_of


def agreeing(rank: int, folder: Path) -> object:
    """Rank 1 cannot serve the first backend; both can serve the second."""
    refused = agreed_reason(f"tp{rank}", "kv_pool" if rank else None, dist.group.WORLD, 30)
    return [refused, agreed_reason(f"tp{rank}", None, dist.group.WORLD, 30)]


def absent(rank: int, folder: Path) -> object:
    """Rank 1 says nothing while rank 0 waits for it."""
    if rank == 0:
        try:
            agreed_reason("tp0", None, dist.group.WORLD, 1.0)
        except RanksApart as error:
            (folder / "done").touch()
            return str(error)
    while not (folder / "done").exists():
        pass
    return None


def failing(rank: int, folder: Path) -> object:
    """Rank 1 fails at its third eager call; what each rank serves before, at and after it."""
    verifier, call = FakeVerifier(), make_call()
    slot = make_slot(Mode.ON, calls=[call], verifier=verifier, ranks=FallbackFlag(folder, f"tp{rank}"))
    served = []
    for number in range(5):
        verifier.error = ValueError("out of registers") if (rank, number) == (1, 2) else None
        if rank:
            dist.barrier()  # rank 0 calls first: in the third round it must not see the flag yet
        served.append(slot(*call))
        if not rank:
            dist.barrier()
        dist.barrier()
    slot.in_graph = lambda: True
    try:
        slot(*call)
    except RanksApart as error:
        return [served, slot.counters.snapshot()["declines"], slot.ranks.message, str(error)]
    return served


def capturing(rank: int, folder: Path) -> object:
    """Rank 1 fails while a graph is captured."""
    error = ValueError("cold") if rank else None
    slot = make_slot(
        Mode.ON, calls=[make_call()], verifier=FakeVerifier(error=error), in_graph=lambda: True,
        ranks=FallbackFlag(folder, f"tp{rank}"),
    )  # fmt: skip
    if rank == 0:
        dist.barrier()  # not before rank 1 has failed
    try:
        return slot(*make_call())
    except RanksApart as apart:
        return str(apart)
    finally:
        if rank:
            dist.barrier()


def files(rank: int, folder: Path) -> object:
    """Both write a counter file and a captured case at the same moment; the names of this rank's cases."""
    call = make_call()
    facts = make_facts(layer_of={call.k_buffer.data_ptr(): 0}, rank=f"tp{rank}")
    capture = Capture(settings_for(folder / "cases"), facts, CurrentBatch())
    (folder / "cases").mkdir(exist_ok=True)
    slot = make_slot(Mode.ON, calls=[call], capture=capture)
    capture.current.forward_batch = batch_for(call)
    dist.barrier()
    StatusFile(folder / "status", {"backends": [{**report_of(slot), "rank": facts.rank}]})
    slot(*call)
    settled(capture, 1)
    dist.barrier()
    return sorted(path.name for path in (folder / "cases").glob(f"*-{facts.rank}-*.safetensors"))


def main(rank: str, folder: str, scene: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    print(json.dumps(globals()[scene](int(rank), Path(folder))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
