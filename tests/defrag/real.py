"""SGLang's own classes for tests, or the reason why they are not to be had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.defrag_backend import ServerShape
from harness.defrag_sglang import SglangBackend, missing
from harness.defrag_sim import Server
from tests.defrag.pools import SHAPE, server

needs_sglang = [
    pytest.mark.sglang,
    pytest.mark.skipif(missing() is not None, reason=f"needs an installed SGLang: {missing()}"),
]


def real_server(tier: str, seed: int = 0, shape: ServerShape = SHAPE) -> tuple[Server, SglangBackend]:
    """A simulated server on SGLang's classes."""
    backend = SglangBackend(shape, tier)
    return server(tier, seed, shape=shape, backend=backend), backend


def scheduler_of(sim: Server, backend: SglangBackend) -> Any:
    """What the agent sees of SGLang's scheduler, over a simulated server; ``refresh`` it before each step."""
    import torch

    decode = SimpleNamespace(is_extend=lambda: False)
    batch = SimpleNamespace(reqs=[], out_cache_loc=torch.empty(0, dtype=torch.int64), forward_mode=decode)
    runner = SimpleNamespace(token_to_kv_pool=backend.site.kv_pools[1])
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=backend.allocator,
        req_to_token_pool=backend.table,
        tree_cache=backend.tree,
        draft_worker=SimpleNamespace(draft_worker=SimpleNamespace(draft_runners=[runner])),
        running_batch=batch,
        last_batch=batch,
        chunked_req=None,
        waiting_queue=[],
        result_queue=[],
    )

    def refresh() -> None:
        batch.reqs = [j.req for j in sim.running]
        scheduler.chunked_req = sim.chunked.req if sim.chunked else None
        scheduler.waiting_queue = [j.req for j in sim.waiting]

    scheduler.refresh = refresh
    return scheduler
