"""The pool under the simulated server: the NumPy model, or SGLang's own classes where they are installed.

A tier chooses the allocator: ``off`` the stock one, ``sort`` and ``relocate`` the sorted one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from harness.defrag_content import LAYERS, WORDS
from sglang_glue.defrag import model_state
from sglang_glue.defrag.model_cache import ModelCache, ModelReq
from sglang_glue.defrag.model_pools import SortedAllocator, TokenAllocator
from sglang_glue.defrag.mover import move_on_host, pools_of_arrays
from sglang_glue.defrag.plan import Plan
from sglang_glue.defrag.reserve import DEFAULT_BLOCK
from sglang_glue.defrag.runs import Slots
from sglang_glue.defrag.snapshot import Snapshot

TIERS = ("off", "sort", "relocate")


@dataclass(frozen=True)
class ServerShape:
    """Sizes of the simulated server, in slots and tokens; ``draft`` is T, the draft tokens a step; ``block`` is the
    growth of a decoding request in the sorted tiers (0: what it needs)."""

    slots: int = 32768
    context: int = 4096
    running: int = 16
    chunk: int = 2048
    draft: int = 9
    block: int = DEFAULT_BLOCK


class Backend(Protocol):
    """Operations of a request's life; see ``ModelCache``.

    ``calls`` counts the allocator's allocs and frees; ``layers`` are the pools' rows, [slots + 1, WORDS] each.
    """

    name: str
    block: int
    calls: int
    layers: list[NDArray[np.uint64]]

    def request(self, tokens: NDArray[np.int64], known: int) -> Any: ...
    def match(self, req: Any) -> None: ...
    def admit(self, req: Any) -> bool: ...
    def grow(self, reqs: list[Any], lengths: list[int], block: int = 0) -> bool: ...
    def share(self, req: Any) -> None: ...
    def finish(self, req: Any, insert: bool) -> None: ...
    def slots_of(self, req: Any, start: int, end: int) -> Slots: ...
    def snapshot(self, live: list[Any]) -> Snapshot: ...
    def relocate(self, snapshot: Snapshot, plan: Plan, live: list[Any], waiting: list[Any]) -> None:
        """Move the rows and rename the slots wherever one is named."""
        ...

    def stretches(self) -> Iterable[tuple[int, Slots, Slots]]: ...
    def free_slots(self) -> Slots: ...
    def room(self) -> int:
        """Slots that are free or could be evicted."""
        ...

    def counted(self) -> tuple[int, int]:
        """Free and cached slots by the classes' own counters."""
        ...


class ModelBackend:
    """The NumPy model."""

    name = "model"

    def __init__(self, shape: ServerShape, tier: str) -> None:
        allocator = TokenAllocator(shape.slots) if tier == "off" else SortedAllocator(shape.slots)
        self.cache = ModelCache(allocator, shape.running + 1, shape.context + 2 * shape.draft, bigram=True)
        self.layers = [np.zeros((shape.slots + 1, WORDS), np.uint64) for _ in range(LAYERS)]
        self.pools = pools_of_arrays(self.layers)
        self.block = 0 if tier == "off" else shape.block
        self.calls = 0
        count_calls(self, allocator)
        self.match = self.cache.match
        self.admit = self.cache.admit
        self.grow = self.cache.grow
        self.share = self.cache.share
        self.slots_of = self.cache.slots_of

    def request(self, tokens: NDArray[np.int64], known: int) -> ModelReq:
        return ModelReq(tokens, known)

    def finish(self, req: ModelReq, insert: bool) -> None:
        self.cache.finish(req, insert)

    def snapshot(self, live: list[ModelReq]) -> Snapshot:
        return model_state.take_snapshot(self.cache, live)

    def relocate(self, snapshot: Snapshot, plan: Plan, live: list[ModelReq], waiting: list[ModelReq]) -> None:
        move_on_host(self.pools, plan)
        model_state.commit(self.cache, plan, live + waiting)

    def stretches(self) -> Iterable[tuple[int, Slots, Slots]]:
        return model_state.tree_stretches(self.cache)

    def free_slots(self) -> Slots:
        return self.cache.allocator.all_free()

    def room(self) -> int:
        return self.cache.allocator.available_size() + self.cache.tree.evictable_size

    def counted(self) -> tuple[int, int]:
        tree = self.cache.tree
        return self.cache.allocator.available_size(), tree.evictable_size + tree.protected_size


def count_calls(backend: Any, allocator: Any) -> None:
    """Count every alloc and free of an allocator on the backend."""

    def counted(method: Any) -> Any:
        def call(*args: Any) -> Any:
            backend.calls += 1
            return method(*args)

        return call

    allocator.alloc, allocator.free = counted(allocator.alloc), counted(allocator.free)
