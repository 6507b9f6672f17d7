"""Relocation on SGLang's own classes: faults are caught, half-known servers refused, and nothing moves in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.defrag_sglang import SglangBackend
from harness.defrag_sim import Server
from sglang_glue.defrag.plan import Plan
from sglang_glue.defrag.planner import plan_round
from sglang_glue.defrag.snapshot import OwnershipError
from tests.defrag.pools import EAGER, SHAPE
from tests.defrag.real import needs_sglang, real_server, scheduler_of

pytestmark = needs_sglang


class Case:
    """A busy server on SGLang's classes and a plan for it, ready to be carried out."""

    def __init__(self, seed: int = 0) -> None:
        from sglang_glue.defrag.sglang_state import holders, take_snapshot
        from sglang_glue.defrag.sglang_transaction import Stamp

        self.sim: Server
        self.backend: SglangBackend
        self.sim, self.backend = real_server("sort", seed, replace(SHAPE, running=3))
        while self.sim.totals.steps < 80 or len(self.sim.live) < 3 or not self.sim.waiting:
            self.sim.step()
        self.site = self.backend.site
        self.reqs = [j.req for j in self.sim.live]
        self.waiting = [j.req for j in self.sim.waiting]
        self.held = holders(self.reqs)
        self.stamp = Stamp.of(self.site)
        self.snapshot = take_snapshot(self.site, self.held)
        self.plan = plan_round(self.snapshot, EAGER)
        assert len(self.plan) > 10

    def execute(self, move: Any = None, batches: tuple[Any, ...] = ()) -> int:
        from sglang_glue.defrag.sglang_transaction import execute, move_rows

        everyone = self.reqs + self.waiting
        return execute(
            self.site, self.snapshot, self.stamp, self.plan, self.held, everyone, batches, move or move_rows
        )

    def verify(self) -> None:
        from sglang_glue.defrag.sglang_agent import verify

        verify(self.site, self.snapshot, self.plan, self.held)


def test_every_name_follows_its_row() -> None:
    from types import SimpleNamespace

    import torch

    case = Case()
    table = case.plan.lookup(case.snapshot.size)
    matched = [r.prefix_indices.clone() for r in case.reqs + case.waiting]
    assert any(len(m) for m in matched)
    batch = SimpleNamespace(out_cache_loc=torch.from_numpy(case.plan.src.copy()))
    moved = case.execute(batches=(batch, batch, None))
    case.verify()
    case.sim.check()
    assert moved == len(case.plan) * 48
    for req, old in zip(case.reqs + case.waiting, matched, strict=True):
        assert req.prefix_indices.tolist() == table[old.numpy()].tolist()
    assert batch.out_cache_loc.tolist() == case.plan.dst.tolist(), "each batch is renamed once"
    for _ in range(60):
        case.sim.step()
    case.sim.check()


def test_a_dropped_move_is_caught() -> None:
    from sglang_glue.defrag.sglang_transaction import RelocationError, move_rows

    case = Case()

    def drop_one(site: Any, plan: Plan) -> int:
        layer = case.backend.layers[0]
        victim = int(np.flatnonzero((layer[plan.src] != layer[plan.dst]).any(axis=1))[0])
        old = layer[plan.dst[victim]].copy()
        done = move_rows(site, plan)
        layer[plan.dst[victim]] = old
        return done

    with pytest.raises(
        RelocationError, match=rf"the row of slot \d+ changed .* \(1 of {len(case.plan)} rows\)"
    ):
        case.execute(drop_one)


@pytest.mark.parametrize("layer", [0, 1, 2], ids=["first", "last", "draft"])
def test_a_slot_written_during_the_plan_is_caught(layer: int) -> None:
    from sglang_glue.defrag.sglang_transaction import RelocationError, move_rows

    case = Case()

    def write_first(site: Any, plan: Plan) -> int:
        case.backend.layers[layer][plan.src[0]] += 1
        return move_rows(site, plan)

    with pytest.raises(RelocationError, match=f"the row of slot {int(case.plan.src[0])} changed"):
        case.execute(write_first)


def old_name(case: Case, what: str) -> Callable[[], None] | None:
    """How to give one moved slot its old name back, in one place; None when the plan moves no such slot."""
    import torch

    from sglang_glue.defrag.sglang_allocator import replace_free
    from sglang_glue.defrag.sglang_state import tree_nodes

    src = case.plan.src
    if what == "tree":
        for node in tree_nodes(case.site.tree):
            if np.isin(node.value.numpy(), src).any():
                value = node.value
                return lambda: setattr(node, "value", value)
        return None
    if what == "free list":
        allocator = case.site.allocator
        free = torch.cat((allocator.free_pages, allocator.release_pages))
        return None if np.isin(src, case.plan.dst).all() else lambda: replace_free(allocator, free)
    for h in case.held:
        part = slice(0, h.protected) if what == "row" else slice(h.protected, h.allocated)
        row = case.site.table.req_to_token[h.row, part]
        if np.isin(row.numpy(), src).any():
            old = row.clone()
            return lambda: row.copy_(old)
    return None


@pytest.mark.parametrize("what", ["tree", "row", "tail", "free list"])
def test_a_reference_that_is_not_updated_is_caught(what: str) -> None:
    from sglang_glue.defrag.sglang_transaction import RelocationError

    undo = None
    seed = 0
    while undo is None:  # not every plan moves a slot of each kind
        case = Case(seed)
        undo = old_name(case, what)
        seed += 1
    case.execute()
    undo()
    with pytest.raises(RelocationError, match="after a relocation"):
        case.verify()


def test_slots_taken_since_the_snapshot_refuse_the_plan() -> None:
    from sglang_glue.defrag.sglang_transaction import Refused

    for change in ("alloc", "free"):
        case = Case()
        before = [layer.copy() for layer in case.backend.layers]
        if change == "alloc":
            assert case.site.allocator.alloc(1) is not None
        else:
            req = case.reqs[0]
            row = case.site.table.req_to_token[req.req_pool_idx]
            case.site.allocator.free(row[req.allocated - 1 : req.allocated])
        with pytest.raises(Refused, match="slots were allocated or freed while the plan was made"):
            case.execute()
        assert all(np.array_equal(a, b) for a, b in zip(before, case.backend.layers, strict=True))


def test_a_row_that_disagrees_with_the_tree_is_refused() -> None:
    from sglang_glue.defrag.sglang_state import take_snapshot

    case = Case()
    h = next(h for h in case.held if h.protected > 2)
    case.site.table.req_to_token[h.row, 1] = int(case.site.table.req_to_token[h.row, 0])
    with pytest.raises(OwnershipError, match="slots of its row are not the"):
        take_snapshot(case.site, case.held)


def agent_of(sim: Server, backend: SglangBackend, interval: int = 4) -> tuple[Any, Any]:
    from sglang_glue.defrag.settings import DefragSettings, Tier
    from sglang_glue.defrag.sglang_agent import Agent

    scheduler = scheduler_of(sim, backend)
    settings = DefragSettings(Tier.RELOCATE, 96 * 48, interval, 64.0, 128.0, 0)
    agent = Agent(scheduler, settings, backend.allocator.kdtree_counters)
    agent.enable_relocation()
    assert agent.unsupported is None
    return agent, scheduler


def until_a_plan_pays(sim: Server) -> None:
    for _ in range(60):
        sim.step()
    while len(plan_round(sim.backend.snapshot([j.req for j in sim.live]), EAGER)) == 0:
        sim.step()


def test_an_agent_relocates_a_busy_server() -> None:
    sim, backend = real_server("sort", 1)
    agent, scheduler = agent_of(sim, backend)
    for step in range(200):
        scheduler.refresh()
        assert not agent.before_step(), "without overlap every step is quiet"
        sim.step()
        if step % 20 == 0:
            sim.check()
    sim.check()
    assert agent.counters.relocations > 10 and not agent.counters.refused
    report = agent.report()
    assert report["counters"]["bytes_moved"] == agent.counters.rows_moved * 48, (
        "the model's layers and the draft's"
    )
    assert report["live_runs"]["tokens"] > 0 and report["sorted_allocator"]["allocs"] > 100


def test_nothing_moves_while_a_step_is_in_flight() -> None:
    """Kind 26: the agent asks for a quiet step, and moves only in it."""
    sim, backend = real_server("sort", 1)
    agent, scheduler = agent_of(sim, backend)
    until_a_plan_pays(sim)
    scheduler.refresh()
    scheduler.result_queue = [("batch", "result")]
    asked = [agent.before_step() for _ in range(12)]
    assert any(asked) and agent.counters.relocations == 0
    assert agent.counters.drains == sum(asked)
    scheduler.result_queue = []
    assert not agent.before_step()
    assert agent.counters.relocations == 1
    sim.check()


def test_a_prefill_in_flight_is_not_drained() -> None:
    """Its batch is merged only by the step that follows; an idle turn would lose it."""
    sim, backend = real_server("sort", 1)
    agent, scheduler = agent_of(sim, backend)
    until_a_plan_pays(sim)
    scheduler.refresh()
    scheduler.result_queue = [("batch", "result")]
    scheduler.last_batch.forward_mode.is_extend = lambda: True
    assert not any(agent.before_step() for _ in range(12))
    assert agent.counters.relocations == agent.counters.drains == 0


def test_agents_of_two_ranks_decide_the_same() -> None:
    plans = []
    for _ in range(2):
        sim, backend = real_server("sort", 3)
        agent, scheduler = agent_of(sim, backend)
        seen = []
        for _ in range(120):
            scheduler.refresh()
            agent.before_step()
            seen.append(agent.counters.last_plan)
            sim.step()
        plans.append(seen)
    assert plans[0] == plans[1] and len(set(plans[0])) > 5


def test_unknown_parts_are_refused_by_name() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_glue.defrag.sglang_state import site_of
    from sglang_glue.defrag.unsupported import Unsupported

    sim, backend = real_server("sort")
    scheduler = scheduler_of(sim, backend)
    assert site_of(scheduler).kv_pools == backend.site.kv_pools
    scheduler.tree_cache = object.__new__(UnifiedRadixCache)
    with pytest.raises(Unsupported, match=r"prefix cache sglang\..*\.UnifiedRadixCache: relocation supports"):
        site_of(scheduler)
    scheduler.tree_cache = backend.tree
    scheduler.draft_worker = type("EAGLEWorkerV2", (), {})()
    with pytest.raises(Unsupported, match="draft worker .*EAGLEWorkerV2: its KV pool was not found"):
        site_of(scheduler)
    runner = type("Runner", (), {"token_to_kv_pool": object.__new__(MHATokenToKVPool)})
    scheduler.draft_worker.draft_worker = type("Draft", (), {"draft_runners": [runner]})
    with pytest.raises(
        Unsupported, match=r"KV pool .*MHATokenToKVPool: relocation supports .*MLATokenToKVPool"
    ):
        site_of(scheduler)


def test_the_draft_pool_is_part_of_the_site_once() -> None:
    from sglang_glue.defrag.sglang_state import site_of

    sim, backend = real_server("sort")
    scheduler = scheduler_of(sim, backend)
    scheduler.draft_worker.draft_worker.draft_runners *= 2
    assert site_of(scheduler).kv_pools == backend.site.kv_pools
    assert site_of(scheduler).pools().bases.size == 3
    scheduler.draft_worker = type("NGRAMWorker", (), {})()
    assert site_of(scheduler).kv_pools == backend.site.kv_pools[:1], "n-gram drafts have no KV"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_hierarchical_cache": True}, "enable_hierarchical_cache: the hierarchical cache"),
        ({"require_mlp_sync": True}, "require_mlp_sync: data-parallel attention"),
        ({"is_hybrid_swa": True}, "is_hybrid_swa: sliding-window"),
        ({"dllm_config": object()}, "dllm_config: diffusion models"),
        ({"ps": type("P", (), {"pp_size": 2})}, "pipeline parallelism"),
        ({"disaggregation_mode": type("M", (), {"value": "decode"})}, "disaggregation mode decode"),
    ],
)
def test_modes_that_name_slots_elsewhere_are_refused(change: dict[str, Any], message: str) -> None:
    from sglang_glue.defrag.sglang_state import site_of
    from sglang_glue.defrag.unsupported import Unsupported

    sim, backend = real_server("sort")
    scheduler = scheduler_of(sim, backend)
    vars(scheduler).update(change)
    with pytest.raises(Unsupported, match=message):
        site_of(scheduler)


def test_an_agent_notes_why_it_does_not_relocate() -> None:
    from sglang_glue.defrag.settings import DefragSettings, Tier
    from sglang_glue.defrag.sglang_agent import Agent

    sim, backend = real_server("sort")
    scheduler = scheduler_of(sim, backend)
    scheduler.enable_hisparse = True
    agent = Agent(scheduler, DefragSettings(Tier.RELOCATE), backend.allocator.kdtree_counters)
    agent.enable_relocation()
    assert "enable_hisparse" in agent.report()["relocation"]
    for _ in range(300):
        sim.step()
        scheduler.refresh()
        assert not agent.before_step()
    assert agent.counters.relocations == 0 and agent.live.tokens > 0, "it still measures"
