"""Reading SGLang's scheduler: what is supported, whether anything is in flight, and who owns which slot.

Types are told by their full names, so nothing of SGLang is imported. Written against 0.5.17; see
``docs/defragmentation.md`` for what 0.5.23 allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_glue.defrag.mover import Pools
from sglang_glue.defrag.runs import Slots
from sglang_glue.defrag.snapshot import OwnershipError, Snapshot, Unit
from sglang_glue.defrag.unsupported import Unsupported, type_name

TREE = "sglang.srt.mem_cache.radix_cache.RadixCache"
ALLOCATORS = (
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator",
    "sglang_glue.defrag.sglang_allocator.sorted_allocator_class.<locals>.SortedTokenAllocator",
)
POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"
TABLE = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
REFUSED_MODES = (
    ("enable_hierarchical_cache", "the hierarchical cache copies slots behind the scheduler's back"),
    ("enable_hisparse", "HiSparse keeps slot numbers of its own"),
    ("enable_unified_memory", "unified memory moves slots itself"),
    ("enable_pdmux", "PD multiplexing runs two batches at once"),
    ("require_mlp_sync", "data-parallel attention needs all ranks to run every step"),
    ("is_hybrid_swa", "sliding-window pools have slots of their own"),
    ("is_hybrid_ssm", "state-space pools have slots of their own"),
    ("dllm_config", "diffusion models keep requests where relocation does not look"),
)
NGRAM_WORKER = "NGRAMWorker"


@dataclass(frozen=True)
class Holder:
    """What a request says about its slots; 0.5.17 keeps it on the request, 0.5.23 on ``req.kv``."""

    req: Any
    row: int
    committed: int
    allocated: int
    protected: int


@dataclass(frozen=True)
class Site:
    """The parts of a server that name slots."""

    allocator: Any
    table: Any
    tree: Any
    kv_pools: tuple[Any, ...]

    def check(self) -> None:
        """Raise Unsupported, naming the first part of a type that relocation does not know."""
        _expect("allocator", self.allocator, ALLOCATORS)
        _expect("request table", self.table, (TABLE,))
        _expect("prefix cache", self.tree, (TREE,))
        for pool in self.kv_pools:
            _expect("KV pool", pool, (POOL,))
        for name, part in (("allocator", self.allocator), ("prefix cache", self.tree)):
            if part.page_size != 1:
                raise Unsupported(f"{name} with page size {part.page_size}: relocation supports 1 only")
        if getattr(self.tree, "disable", False):
            raise Unsupported("the radix cache is disabled: relocation has not been written for chunk caches")

    def pools(self) -> Pools:
        """The layer buffers of all pools, for the mover."""
        buffers = [b for pool in self.kv_pools for b in pool.kv_buffer]
        for i, buffer in enumerate(buffers):
            if not buffer.is_contiguous():
                raise Unsupported(f"layer buffer {i} is not contiguous")
        return Pools(
            np.array([b.data_ptr() for b in buffers], np.int64),
            np.array([b[0].numel() * b.element_size() for b in buffers], np.int64),
            min(b.shape[0] for b in buffers),
        )


def _expect(what: str, part: Any, names: Iterable[str]) -> None:
    if type_name(part) not in names:
        raise Unsupported(f"{what} {type_name(part)}: relocation supports {' and '.join(names)}")


def site_of(scheduler: Any) -> Site:
    """The site of a scheduler. Raises Unsupported, naming the mode or type that relocation does not know."""
    for name, why in REFUSED_MODES:
        if getattr(scheduler, name, None):
            raise Unsupported(f"{name}: {why}")
    mode = getattr(getattr(scheduler, "disaggregation_mode", None), "value", "null")
    if mode not in ("null", None):
        raise Unsupported(f"disaggregation mode {mode}: transfers name slots")
    if getattr(getattr(scheduler, "ps", None), "pp_size", 1) > 1:
        raise Unsupported("pipeline parallelism: several batches are in flight")
    allocator = scheduler.token_to_kv_pool_allocator
    pools = {
        id(p): p for p in (allocator.get_kvcache(), *_draft_pools(scheduler))
    }  # a draft may share its model's
    site = Site(allocator, scheduler.req_to_token_pool, scheduler.tree_cache, tuple(pools.values()))
    site.check()
    return site


def _draft_pools(scheduler: Any) -> Iterator[Any]:
    worker = getattr(scheduler, "draft_worker", None)
    if worker is None or type(worker).__name__ == NGRAM_WORKER:
        return
    draft = getattr(worker, "draft_worker", None)
    runners = getattr(draft, "draft_runners", None) or [getattr(draft, "draft_runner", None)]
    runners = [r for r in runners if r is not None]
    if not runners:
        raise Unsupported(f"draft worker {type_name(worker)}: its KV pool was not found")
    for runner in runners:
        yield runner.token_to_kv_pool


def in_flight(scheduler: Any) -> str | None:
    """What is in flight, or None when every launched step has been processed."""
    queue = getattr(scheduler, "result_queue", None)
    if queue:
        return f"{len(queue)} launched step(s) wait to be processed"
    allocator = scheduler.token_to_kv_pool_allocator
    immediate = getattr(allocator, "is_not_in_free_group", None)
    if (allocator.free_group is not None) if immediate is None else (not immediate):
        return "a group of frees is open"
    return None


def requests_of(scheduler: Any) -> list[Any]:
    """Every request that the scheduler knows, each once: waiting, chunked, running and just run."""
    found: dict[int, Any] = {}
    for batch in (scheduler.running_batch, scheduler.last_batch):
        for req in [] if batch is None else batch.reqs:
            found.setdefault(id(req), req)
    grammar = getattr(getattr(scheduler, "grammar_manager", None), "grammar_queue", [])
    for req in [scheduler.chunked_req, *scheduler.waiting_queue, *grammar]:
        if req is not None:
            found.setdefault(id(req), req)
    return list(found.values())


def holders(requests: Iterable[Any]) -> list[Holder]:
    """The requests that hold a row of the table."""
    found = []
    for req in requests:
        row = _field(req, "req_pool_idx")
        if row is not None and req.kv is not None:
            lengths = (
                int(_field(req, n)) for n in ("kv_committed_len", "kv_allocated_len", "cache_protected_len")
            )
            found.append(Holder(req, int(row), *lengths))
    return found


def _field(req: Any, name: str) -> Any:
    return getattr(req, name) if hasattr(req, name) else getattr(req.kv, name, None)


def tree_nodes(tree: Any) -> list[Any]:
    """The nodes of a RadixCache with slots on the device, parents first, children in insertion order."""
    found = []
    stack = list(tree.root_node.children.values())[::-1]
    while stack:
        node = stack.pop()
        if node.value is not None:
            found.append(node)
        stack.extend(list(node.children.values())[::-1])
    return found


def take_snapshot(site: Site, held: list[Holder]) -> Snapshot:
    """Who owns which slot. Three transfers from the device, whatever the number of requests and nodes."""
    nodes = tree_nodes(site.tree)
    values = _split(
        torch.cat([n.value for n in nodes]).cpu().numpy() if nodes else None, [len(n.value) for n in nodes]
    )
    rows = _rows(site, held)
    free = torch.cat((site.allocator.free_pages, site.allocator.release_pages)).cpu().numpy()
    index = {id(node): i for i, node in enumerate(nodes)}
    units = [
        Unit(v, int(n.lock_ref), index.get(id(n.parent), -1), f"tree node {n.id}")
        for n, v in zip(nodes, values, strict=True)
    ]
    for h, row in zip(held, rows, strict=True):
        last = h.req.last_node
        _match_tree(h, row, last, index, values)
        own = row[h.protected : h.allocated]
        units.append(Unit(own, 1, index.get(id(last), -1), f"request {_name(h)}'s own slots"))
    committed = tuple(row[: h.committed] for h, row in zip(held, rows, strict=True))
    return Snapshot(site.allocator.size, free, tuple(units), committed)


def _split(flat: Any, lengths: list[int]) -> list[Slots]:
    return [] if flat is None else np.split(flat.astype(np.int64), np.cumsum(lengths)[:-1])


def _rows(site: Site, held: list[Holder]) -> list[Slots]:
    if not held:
        return []
    table = site.table.req_to_token
    which = torch.tensor([h.row for h in held], device=table.device)
    block = table[which, : max(h.allocated for h in held)].cpu().numpy()
    return [block[i, : h.allocated].astype(np.int64) for i, h in enumerate(held)]


def _match_tree(h: Holder, row: Slots, last: Any, index: dict[int, int], values: list[Slots]) -> None:
    """The protected part of a row must be the tree's own slots, or renaming them in both would part them."""
    path: list[Slots] = []
    while last is not None and id(last) in index:
        path.append(values[index[id(last)]])
        last = last.parent
    cached = np.concatenate(path[::-1]) if path else np.empty(0, np.int64)
    if not np.array_equal(cached, row[: h.protected]):
        raise OwnershipError(
            f"request {_name(h)}: the first {h.protected} slots of its row are not the {cached.size} of its tree node"
        )


def _name(h: Holder) -> str:
    return str(getattr(h.req, "rid", h.row))
