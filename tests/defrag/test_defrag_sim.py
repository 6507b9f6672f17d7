"""Churn under every tier keeps the invariants, and every planted fault is caught (kinds 24, 25)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.defrag_content import ContentError
from harness.defrag_sim import Server
from sglang_glue.defrag import model_state
from sglang_glue.defrag.mover import move_on_host
from sglang_glue.defrag.plan import Plan, make_plan
from sglang_glue.defrag.snapshot import OwnershipError
from tests.defrag.pools import SHAPE, server


def run(sim: Server, steps: int, check_every: int = 20) -> Server:
    for step in range(steps):
        sim.step()
        if step % check_every == 0:
            sim.check()
    sim.check()
    return sim


@pytest.mark.parametrize("tier", ["off", "sort", "relocate"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_churn_keeps_the_invariants(tier: str, seed: int) -> None:
    sim = run(server(tier, seed), 300)
    totals = sim.totals
    assert totals.finished > 10 and totals.aborted > 0
    assert (totals.relocations > 5) == (tier == "relocate")


def test_the_pool_runs_over() -> None:
    """A pool that is too small evicts and retracts, and still nothing is lost."""
    shape = replace(SHAPE, slots=600)
    sim = run(server("relocate", 3, shape=shape), 400)
    free, cached = sim.backend.counted()
    assert free < shape.slots // 4 and cached > 0
    assert sim.totals.retracted > 0 and sim.totals.relocations > 5


def test_tiers_serve_the_same_requests() -> None:
    """Relocation and order of slots change nothing that a client sees."""
    ends = {}
    for tier in ("off", "sort", "relocate"):
        sim = server(tier, 5, requests=40)
        while not sim.done:
            sim.step()
        sim.check()
        ends[tier] = (sim.totals.finished, sim.totals.aborted)
        free, cached = sim.backend.counted()
        assert free + cached == SHAPE.slots
    assert len(set(ends.values())) == 1
    assert sum(ends["off"]) == 40


def test_relocation_lengthens_runs() -> None:
    means = {}
    for tier in ("off", "relocate"):
        sim = server(tier, 1)
        for step in range(400):
            sim.step()
            if step > 200 and step % 10 == 0:
                sim.sample()
        means[tier] = float(np.mean([s.live.mean for s in sim.samples]))
    assert means["relocate"] > 3 * means["off"]


def with_fault(plant: Callable[[Any, Plan], Plan | None]) -> Server:
    """A server whose tenth relocation goes wrong: ``plant`` acts before the commit and may replace the plan."""
    sim = server("relocate", 2)
    backend: Any = sim.backend

    def relocate(snapshot: Any, plan: Plan, live: list[Any], waiting: list[Any]) -> None:
        faulty = sim.totals.relocations == 10
        if faulty:
            plan = plant(sim, plan) or plan
            model_state.commit(backend.cache, plan, live + waiting)
        else:
            move_on_host(backend.pools, plan)
            model_state.commit(backend.cache, plan, live + waiting)

    backend.relocate = relocate
    return sim


def until_caught(sim: Server) -> str:
    with pytest.raises((ContentError, OwnershipError, AssertionError)) as caught:
        for _ in range(600):
            before = sim.totals.relocations
            sim.step()
            if sim.totals.relocations != before:
                sim.check()
    assert sim.totals.relocations == 11, "caught at the relocation that went wrong"
    return str(caught.value)


def held_rows(sim: Server, plan: Plan) -> np.ndarray:  # type: ignore[type-arg]
    """Moves of the plan whose rows a live request reads, and whose destination holds something else so far."""
    rows = np.concatenate([sim.backend.slots_of(j.req, 0, j.req.committed) for j in sim.live])
    layer = sim.content.layers[0]
    return np.flatnonzero(np.isin(plan.src, rows) & (layer[plan.src] != layer[plan.dst]).any(axis=1))


def test_a_move_that_is_dropped_is_caught() -> None:
    def plant(sim: Server, plan: Plan) -> None:
        victim = held_rows(sim, plan)[0]
        before = [layer[plan.dst[victim]].copy() for layer in sim.content.layers]
        move_on_host(sim.backend.pools, plan)  # type: ignore[attr-defined]
        for layer, row in zip(sim.content.layers, before, strict=True):
            layer[plan.dst[victim]] = row

    assert "holds another row (1 tokens are wrong)" in until_caught(with_fault(plant))


def test_a_row_of_one_layer_that_is_dropped_is_caught() -> None:
    def plant(sim: Server, plan: Plan) -> None:
        victim = held_rows(sim, plan)[0]
        row = sim.content.layers[2][plan.dst[victim]].copy()
        move_on_host(sim.backend.pools, plan)  # type: ignore[attr-defined]
        sim.content.layers[2][plan.dst[victim]] = row

    assert "layer 2" in until_caught(with_fault(plant)), "the draft model's pool"


def test_a_slot_written_during_the_plan_is_caught() -> None:
    def plant(sim: Server, plan: Plan) -> None:
        victim = plan.src[held_rows(sim, plan)[0]]
        for layer in sim.content.layers:
            layer[victim] = 12345  # a forward that was still in flight
        move_on_host(sim.backend.pools, plan)  # type: ignore[attr-defined]

    assert "holds another row (1 tokens are wrong)" in until_caught(with_fault(plant))


def test_moves_in_the_wrong_order_are_caught() -> None:
    """Copying front to back overwrites rows before they are read."""

    def plant(sim: Server, plan: Plan) -> None:
        for src, dst in zip(plan.path[1:][::-1], plan.path[:-1][::-1], strict=True):
            for layer in sim.content.layers:
                layer[dst] = layer[src]

    assert "holds another row" in until_caught(with_fault(plant))


@pytest.mark.parametrize("what", ["tree", "row", "tail", "free list"])
def test_a_reference_that_is_not_updated_is_caught(what: str) -> None:
    sim = server("relocate", 2)
    backend: Any = sim.backend
    caught: list[str] = []

    def relocate(snapshot: Any, plan: Plan, live: list[Any], waiting: list[Any]) -> None:
        move_on_host(backend.pools, plan)
        undo = _forget(backend.cache, live, plan, what)
        model_state.commit(backend.cache, plan, live + waiting)
        if undo is not None:
            undo()
            with pytest.raises((OwnershipError, ContentError, AssertionError)) as error:
                sim.check()
            caught.append(str(error.value))
            raise StopIteration

    backend.relocate = relocate
    with pytest.raises(StopIteration):
        for _ in range(600):
            sim.step()
    assert len(caught) == 1


def _forget(cache: Any, live: list[Any], plan: Plan, what: str) -> Callable[[], None] | None:
    """Restore, after the commit, one name of a moved slot; None when the plan moves no such slot."""
    if what == "tree":
        for node in cache.tree.nodes():
            if np.isin(node.value, plan.src).any():
                old = node.value
                return lambda: setattr(node, "value", old)
        return None
    if what == "free list":
        if np.isin(plan.src, plan.dst).all():
            return None
        old_free = cache.allocator.all_free()
        return lambda: cache.allocator.replace_free(old_free)
    for req in live:
        start, end = (0, req.protected) if what == "row" else (req.protected, req.allocated)
        row = cache.pool.req_to_token[req.row]
        if np.isin(row[start:end], plan.src).any():
            old_row = row[start:end].copy()
            return lambda: row.__setitem__(slice(start, end), old_row)
    return None


def test_a_forgotten_prefix_of_a_waiting_request_is_caught() -> None:
    """Its slots are read again when it is admitted without another match."""
    from sglang_glue.defrag.model_cache import ModelCache, ModelReq
    from sglang_glue.defrag.model_pools import TokenAllocator

    cache = ModelCache(TokenAllocator(40), 4, 20)
    first, waiting = (ModelReq(np.arange(10), known=10) for _ in range(2))
    cache.match(first)
    assert cache.admit(first) and cache.grow([first], [10])
    first.committed = 10
    cache.share(first)
    cache.match(waiting)
    plan = make_plan(np.array([3]), np.array([30]), cache.allocator.all_free(), 40)
    model_state.commit(cache, plan, [first, waiting])
    assert waiting.prefix_indices.tolist() == [1, 2, 30, 4, 5, 6, 7, 8, 9]
    assert np.array_equal(cache.slots_of(first, 0, 9), waiting.prefix_indices)


def test_attention_output_is_bit_equal_after_relocation() -> None:
    """Kind 25: the oracle over a pool's rows, before and after, on shared prefixes, cycles and chains."""
    from oracle import prefix
    from sglang_glue.defrag.mover import pools_of_arrays
    from sglang_glue.defrag.planner import PlannerSettings, plan_round
    from tests.defrag.pools import moved, scattered

    rng = np.random.default_rng(0)
    state = scattered(11, fill=0.95)
    pool = rng.standard_normal((state.size + 1, 1, 576)).astype(np.float32)
    q = rng.standard_normal((2, 3, 576)).astype(np.float32)
    before = [prefix(q, pool[row], 0.05) for row in state.rows]
    plan = plan_round(state, PlannerSettings(budget_bytes=200 * 100, slot_bytes=100, piece=32))
    assert any(plan.cyclic) or plan.chains < len(plan), "cycles or chains are among the moves"
    move_on_host(pools_of_arrays([pool]), plan)
    after = moved(state, plan.lookup(state.size), plan.free_after(state.free))
    for (out, lse), row in zip(before, after.rows, strict=True):
        again = prefix(q, pool[row], 0.05)
        assert np.array_equal(out, again[0]) and np.array_equal(lse, again[1])
