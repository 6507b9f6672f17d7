"""Snapshot and commit on the model: what ``sglang_state`` and ``sglang_transaction`` do on SGLang's own classes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sglang_glue.defrag.model_cache import ModelCache, ModelReq
from sglang_glue.defrag.model_tree import Node
from sglang_glue.defrag.plan import Plan
from sglang_glue.defrag.runs import Slots
from sglang_glue.defrag.snapshot import Snapshot, Unit


def take_snapshot(cache: ModelCache, live: list[ModelReq]) -> Snapshot:
    """Who owns which slot. ``live`` are the requests that have a row."""
    units: list[Unit] = []
    index: dict[int, int] = {}
    for node in cache.tree.nodes():
        above = -1 if node.parent is None else index.get(id(node.parent), -1)
        index[id(node)] = len(units)
        units.append(Unit(node.value, node.lock_ref, above, f"tree node {len(units)}"))
    for i, req in enumerate(live):
        own = cache.slots_of(req, req.protected, req.allocated)
        above = -1 if req.last_node is None else index.get(id(req.last_node), -1)
        units.append(Unit(own, 1, above, f"request {i}'s own slots"))
    rows = tuple(cache.slots_of(req, 0, req.committed) for req in live)
    return Snapshot(cache.allocator.size, cache.allocator.all_free(), tuple(units), rows)


def tree_stretches(cache: ModelCache) -> Iterator[tuple[int, Slots, Slots]]:
    """Cached stretches (index of the parent or -1, first token of each element, slots), parents first."""
    index: dict[int, int] = {}
    node: Node
    for i, node in enumerate(cache.tree.nodes()):
        index[id(node)] = i
        tokens = node.key >> 32 if cache.tree.bigram else node.key
        yield index.get(id(node.parent), -1), tokens, node.value


def commit(cache: ModelCache, plan: Plan, requests: list[ModelReq]) -> None:
    """Rename the moved slots wherever one is named: free list, tree, request rows and matched prefixes.

    ``requests`` are all requests, waiting ones too.
    """
    table = plan.lookup(cache.allocator.size)
    cache.allocator.replace_free(plan.free_after(cache.allocator.all_free()))
    for node in cache.tree.nodes():
        node.value = table[node.value]
    for req in requests:
        req.prefix_indices = table[req.prefix_indices]
        if req.row is not None:
            row = cache.pool.req_to_token[req.row]
            row[: req.allocated] = table[row[: req.allocated]].astype(np.int32)
