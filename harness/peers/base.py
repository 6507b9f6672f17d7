"""What every kernel in a benchmark has in common, ours included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harness.bench_inputs import Workload

TREE, CHAIN = "tree", "chain"
"""Tail masks: the tree, and token i sees 0..i: all that a kernel with only a causal mask can do."""


class PeerRefused(Exception):
    """The peer is there but does not take this shape; the message says why."""


@dataclass
class Output:
    """Where the latest call left its result: `out` [N, H, D_V] and natural-log `lse` [N, H], if it gives one."""

    out: Tensor | None = None
    lse: Tensor | None = None

    def poison(self) -> None:
        """Fill with NaN what the next call has to write."""
        for tensor in (self.out, self.lse):
            if tensor is not None:
                tensor.fill_(torch.nan)


@dataclass
class Contender:
    """A kernel bound to a workload: one call for each of its slot sets."""

    name: str
    calls: Sequence[Callable[[], None]]
    output: Output
    mask: str = TREE
    own_pages: bool = False
    """It reads pages of PAGE slots: `Workload.page_sets` instead of `Workload.sets`."""
    note: str = ""


class Peer(Protocol):
    """One peer kernel. `available` gives None, or the reason why it cannot run on `device`."""

    name: str

    def available(self, device: torch.device) -> str | None: ...

    def prepare(self, work: Workload) -> Contender:
        """Bind to `work`; raises PeerRefused where the shape is not for it."""
        ...


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs an NVIDIA GPU"


def missing(package: str, error: BaseException) -> str:
    """One line for an import that failed."""
    return f"{package} cannot be imported: {type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]
