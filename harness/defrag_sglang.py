"""SGLang's own classes under the simulated server: its token allocator, request table, radix cache and MLA pools.

They run on the CPU. Only the scheduler's part, a request's life, is played by the simulator; sorted allocation and
relocation are the code that runs in a server. Needs SGLang; ``missing`` says why it cannot be used.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.defrag_backend import ServerShape, count_calls
from sglang_glue.defrag.plan import Plan
from sglang_glue.defrag.reserve import reserved_lengths
from sglang_glue.defrag.runs import Slots
from sglang_glue.defrag.snapshot import Snapshot


def missing() -> str | None:
    """Why SGLang's classes cannot be used here, or None."""
    try:
        import sglang.srt.mem_cache.allocator.token
        import sglang.srt.mem_cache.memory_pool
        import sglang.srt.mem_cache.radix_cache  # noqa: F401
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        return f"SGLang cannot be imported ({type(error).__name__}: {error})"
    return None


@dataclass(eq=False)
class SglangReq:
    """A request under the names that SGLang's ``Req`` has (0.5.17), and those that the simulator uses."""

    tokens: NDArray[np.int64]
    known: int
    prefix_indices: Any
    last_node: Any = None
    req_pool_idx: int | None = None
    kv_committed_len: int = 0
    cache_protected_len: int = 0
    kv: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(kv_allocated_len=0))

    @property
    def committed(self) -> int:
        return self.kv_committed_len

    @committed.setter
    def committed(self, value: int) -> None:
        self.kv_committed_len = value

    @property
    def allocated(self) -> int:
        return int(self.kv.kv_allocated_len)

    @property
    def protected(self) -> int:
        return self.cache_protected_len


class SglangBackend:
    """SGLang's classes; operations as in ``ModelCache``."""

    name = "sglang"

    def __init__(self, shape: ServerShape, tier: str) -> None:
        import torch
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        from sglang_glue.defrag.sglang_allocator import activate_sorted
        from sglang_glue.defrag.sglang_state import Site

        self._torch = torch
        pools = (_mla_pool(shape.slots, 2), _mla_pool(shape.slots, 1))  # the model's and the draft model's
        self.allocator = TokenToKVPoolAllocator(shape.slots, torch.bfloat16, "cpu", pools[0], need_sort=False)
        if tier != "off":
            activate_sorted(self.allocator)
        self.table = ReqToTokenPool(shape.running + 1, shape.context + 2 * shape.draft, "cpu", False)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                is_eagle=True,
            )
        )
        self.site = Site(self.allocator, self.table, self.tree, pools)
        self.site.check()
        self.layers = [
            b.view(torch.int64).numpy().view(np.uint64).reshape(shape.slots + 1, -1)
            for pool in pools
            for b in pool.kv_buffer
        ]
        self.block = 0 if tier == "off" else shape.block
        self.calls = 0
        count_calls(self, self.allocator)

    def request(self, tokens: NDArray[np.int64], known: int) -> SglangReq:
        return SglangReq(tokens, known, self._torch.empty(0, dtype=self._torch.int64))

    def match(self, req: SglangReq) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        found = self.tree.match_prefix(MatchPrefixParams(key=_key(req.tokens[: max(req.known - 1, 0)])))
        req.last_node = found.last_device_node
        req.prefix_indices = self._path(req.last_node)
        req.cache_protected_len = len(req.prefix_indices)

    def admit(self, req: SglangReq) -> bool:
        if not self.table.free_slots:
            return False
        req.req_pool_idx = self.table.free_slots.pop(0)
        self.tree.inc_lock_ref(req.last_node)
        length = len(req.prefix_indices)
        self.table.write((req.req_pool_idx, slice(0, length)), req.prefix_indices.to(self._torch.int32))
        req.kv_committed_len = req.kv.kv_allocated_len = length
        return True

    def grow(self, reqs: list[SglangReq], lengths: list[int], block: int = 0) -> bool:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        have = [r.allocated for r in reqs]
        room = self.allocator.available_size() + self.tree.evictable_size()
        width = self.table.req_to_token.shape[1]
        lengths = reserved_lengths(have, lengths, block=block, width=width, room=room)
        needs = [max(0, n - h) for n, h in zip(lengths, have, strict=True)]
        short = sum(needs) - self.allocator.available_size()
        if short > 0:
            self.tree.evict(EvictParams(num_tokens=short))
        slots = self.allocator.alloc(sum(needs)) if sum(needs) else None
        if slots is None:
            return sum(needs) == 0
        for req, part in zip(reqs, self._torch.split(slots, needs), strict=True):
            end = req.allocated + len(part)
            self.table.write((req.req_pool_idx, slice(req.allocated, end)), part.to(self._torch.int32))
            req.kv.kv_allocated_len = end
        return True

    def share(self, req: SglangReq) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        row = self.table.req_to_token[req.req_pool_idx, : req.committed].to(self._torch.int64)
        known = self._insert(req, row)
        self.allocator.free(row[req.protected : known])
        found = self.tree.match_prefix(MatchPrefixParams(key=_key(req.tokens[: req.committed])))
        slots = self._path(found.last_device_node)
        length = len(slots)
        shared = slice(req.protected, length)
        self.table.write((req.req_pool_idx, shared), slots[shared].to(self._torch.int32))
        self.tree.dec_lock_ref(req.last_node)
        self.tree.inc_lock_ref(found.last_device_node)
        req.prefix_indices = self._torch.cat((slots, row[length:]))
        req.cache_protected_len, req.last_node = length, found.last_device_node

    def finish(self, req: SglangReq, insert: bool) -> None:
        row = self.table.req_to_token[req.req_pool_idx, : req.allocated].to(self._torch.int64)
        cached = max(req.committed - 1, 0)
        known = self._insert(req, row) if insert else cached
        self.allocator.free(row[req.protected : max(known, req.protected)])
        self.allocator.free(row[max(cached, req.protected) : req.committed])
        self.tree.dec_lock_ref(req.last_node)
        self.allocator.free(row[req.committed :])
        self.table.free_slots.append(req.req_pool_idx)
        req.req_pool_idx, req.last_node, req.prefix_indices = None, None, row[:0]
        req.kv_committed_len = req.kv.kv_allocated_len = req.cache_protected_len = 0

    def slots_of(self, req: SglangReq, start: int, end: int) -> Slots:
        found: Slots = self.table.req_to_token[req.req_pool_idx, start:end].numpy().astype(np.int64)
        return found

    def snapshot(self, live: list[SglangReq]) -> Snapshot:
        from sglang_glue.defrag.sglang_state import holders, take_snapshot

        return take_snapshot(self.site, holders(live))

    def relocate(
        self, snapshot: Snapshot, plan: Plan, live: list[SglangReq], waiting: list[SglangReq]
    ) -> None:
        from sglang_glue.defrag.sglang_agent import verify
        from sglang_glue.defrag.sglang_state import holders
        from sglang_glue.defrag.sglang_transaction import Stamp, execute

        held = holders(live)
        execute(self.site, snapshot, Stamp.of(self.site), plan, held, live + waiting, ())
        verify(self.site, snapshot, plan, held)

    def stretches(self) -> Iterator[tuple[int, Slots, Slots]]:
        from sglang_glue.defrag.sglang_state import tree_nodes

        nodes = tree_nodes(self.tree)
        index = {id(n): i for i, n in enumerate(nodes)}
        for node in nodes:
            tokens = np.frombuffer(node.key.token_ids, np.int64)[: len(node.key)]
            yield index.get(id(node.parent), -1), tokens, node.value.numpy()

    def free_slots(self) -> Slots:
        found: Slots = self._torch.cat((self.allocator.free_pages, self.allocator.release_pages)).numpy()
        return found

    def room(self) -> int:
        return int(self.allocator.available_size() + self.tree.evictable_size())

    def counted(self) -> tuple[int, int]:
        return self.allocator.available_size(), self.tree.evictable_size() + self.tree.protected_size()

    def _path(self, node: Any) -> Any:
        """The slots from the root down to a node; 0.5.17 gives them with a match, 0.5.23 only the node."""
        values = []
        while node.parent is not None:
            values.append(node.value)
            node = node.parent
        return self._torch.cat(values[::-1]) if values else self._torch.empty(0, dtype=self._torch.int64)

    def _insert(self, req: SglangReq, row: Any) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        key = _key(req.tokens[: req.committed])
        return int(self.tree.insert(InsertParams(key=key, value=row[: len(key)])).prefix_len)


def _key(tokens: NDArray[np.int64]) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", tokens.tolist()), None, is_bigram=True)


def _mla_pool(slots: int, layers: int) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=slots,
        page_size=1,
        dtype=torch.bfloat16,
        kv_lora_rank=4,
        qk_rope_head_dim=4,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
