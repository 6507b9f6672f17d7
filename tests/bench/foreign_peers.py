"""Peers that misbehave, for runs in processes of their own: named as `tests.bench.foreign_peers:Raises` and so on."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from harness.bench_inputs import Workload
from harness.peers.base import Contender, PeerRefused
from harness.peers.torch_dense import TorchDense


class Good:
    """Computes what it should, and fails to on the shapes that `_spoil` picks."""

    def __init__(self) -> None:
        self.name = f"tests.bench.foreign_peers:{type(self).__name__}"

    def available(self, device: Any) -> str | None:
        return None

    def prepare(self, work: Workload) -> Contender:
        print("chatter on stdout that is no reply")
        self._spoil(work)
        return TorchDense().prepare(work)

    def _spoil(self, work: Workload) -> None:
        pass


class Absent(Good):
    def available(self, device: Any) -> str | None:
        return "not for this machine"


class Refuses(Good):
    def _spoil(self, work: Workload) -> None:
        raise PeerRefused("pages only")


class Raises(Good):
    def _spoil(self, work: Workload) -> None:
        raise RuntimeError("no nvcc\nand a second line")


class Wrong(Good):
    def prepare(self, work: Workload) -> Contender:
        contender = super().prepare(work)
        contender.calls = [lambda: contender.output.out.fill_(1.0)] * work.n_sets  # type: ignore[union-attr]
        return contender


class Dies(Good):
    """On the first of the shapes only."""

    def _spoil(self, work: Workload) -> None:
        if work.shape.bs == 1:
            print("illegal address somewhere", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Good):
    def _spoil(self, work: Workload) -> None:
        time.sleep(1000)
