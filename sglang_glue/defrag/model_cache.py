"""The model of a server's KV bookkeeping: allocator, request table and radix tree, and a request's life in them.

The life of a request, as in SGLang: match a cached prefix, hold it, allocate the rest (in chunks), share it after
prefill, over-allocate while decoding, and on the end share the committed part and free what was over-allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglang_glue.defrag.model_pools import NONE, ReqToTokenPool, SortedAllocator, TokenAllocator
from sglang_glue.defrag.model_tree import Node, RadixTree
from sglang_glue.defrag.reserve import reserved_lengths
from sglang_glue.defrag.runs import Slots


@dataclass(eq=False)
class ModelReq:
    """A request. Of ``tokens`` the first ``known`` are there; those below ``committed`` have valid rows."""

    tokens: NDArray[np.int64]
    known: int
    prefix_indices: Slots = field(default_factory=lambda: NONE)
    last_node: Node | None = None
    row: int | None = None
    committed: int = 0
    allocated: int = 0
    protected: int = 0


class ModelCache:
    """Allocator, request table and tree together; the operations that SGLang's scheduler performs on them."""

    def __init__(
        self,
        allocator: TokenAllocator | SortedAllocator,
        max_requests: int,
        max_context: int,
        bigram: bool = False,
    ) -> None:
        self.allocator = allocator
        self.pool = ReqToTokenPool(max_requests, max_context)
        self.tree = RadixTree(allocator, bigram)

    def match(self, req: ModelReq) -> None:
        """Look a waiting request's prefix up. Its slots are not locked and may be gone by its admission."""
        key = self.tree.key_of(req.tokens[: max(req.known - 1, 0)])
        req.prefix_indices, req.last_node = self.tree.match_prefix(key)
        req.protected = req.prefix_indices.size

    def slots_of(self, req: ModelReq, start: int, end: int) -> Slots:
        """Slots of positions ``start`` to ``end`` of an admitted request."""
        return self.pool.req_to_token[req.row, start:end].astype(np.int64)

    def admit(self, req: ModelReq) -> bool:
        """Give a matched request its row and lock its prefix; False when no row is free."""
        row = self.pool.alloc()
        if row is None:
            return False
        req.row = row
        self.tree.lock(req.last_node, 1)
        self.pool.req_to_token[row, : req.prefix_indices.size] = req.prefix_indices
        req.committed = req.allocated = req.prefix_indices.size
        return True

    def grow(self, reqs: list[ModelReq], lengths: list[int], block: int = 0) -> bool:
        """Allocate every request up to its length, in one call, evicting if need be; False when nothing is left.

        With ``block`` (decode steps of the sorted tiers) growth is rounded up; see ``reserve``.
        """
        if block:
            room = self.allocator.available_size() + self.tree.evictable_size
            width = self.pool.req_to_token.shape[1]
            have = [r.allocated for r in reqs]
            lengths = reserved_lengths(have, lengths, block=block, width=width, room=room)
        needs = [max(0, n - r.allocated) for r, n in zip(reqs, lengths, strict=True)]
        total = sum(needs)
        if total == 0:
            return True
        short = total - self.allocator.available_size()
        if short > 0:
            self.tree.evict(short)
        slots = self.allocator.alloc(total)
        if slots is None:
            return False
        at = 0
        for req, need in zip(reqs, needs, strict=True):
            self.pool.req_to_token[req.row, req.allocated : req.allocated + need] = slots[at : at + need]
            req.allocated += need
            at += need
        return True

    def share(self, req: ModelReq) -> None:
        """Put the committed part into the tree while the request goes on (after a prefill or a chunk of it)."""
        key = self.tree.key_of(req.tokens[: req.committed])
        slots = self.slots_of(req, 0, req.committed)
        known = self.tree.insert(key, slots[: key.size])
        self.allocator.free(slots[req.protected : known])
        shared, node = self.tree.match_prefix(key)
        self.pool.req_to_token[req.row, req.protected : key.size] = shared[req.protected :]
        self.tree.lock(req.last_node, -1)
        self.tree.lock(node, 1)
        req.prefix_indices = np.concatenate((shared, slots[key.size :]))
        req.protected, req.last_node = key.size, node

    def finish(self, req: ModelReq, insert: bool = True) -> None:
        """End a request: share its committed part (or free it) and free what was over-allocated."""
        slots = self.slots_of(req, 0, req.allocated)
        key = self.tree.key_of(req.tokens[: req.committed])
        known = self.tree.insert(key, slots[: key.size]) if insert else key.size
        self.allocator.free(slots[req.protected : max(known, req.protected)])
        self.allocator.free(slots[max(key.size, req.protected) : req.committed])
        self.tree.lock(req.last_node, -1)
        self.allocator.free(slots[req.committed :])
        assert req.row is not None
        self.pool.free(req.row)
        req.row, req.last_node, req.prefix_indices = None, None, NONE
        req.committed = req.allocated = req.protected = 0
