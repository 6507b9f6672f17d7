"""Ranks decide the same, and where they would not, none of them goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from sglang_glue.defrag.planner import plan_round
from tests.defrag.pools import EAGER, scattered
from tests.defrag.real import needs_sglang, real_server, scheduler_of

torch = pytest.importorskip("torch")

DIGESTS = """
from sglang_glue.defrag.planner import plan_round
from tests.defrag.pools import EAGER, scattered
print([(s.digest(), plan_round(s, EAGER).digest()) for s in map(scattered, range(12))])
"""


def test_planners_in_processes_of_their_own_make_the_same_plans() -> None:
    """Neither the order of hashing nor the process enters a plan."""
    found = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        found.append(
            subprocess.run([sys.executable, "-c", DIGESTS], env=env, check=True, capture_output=True).stdout
        )
    here = [(s.digest(), plan_round(s, EAGER).digest()) for s in map(scattered, range(12))]
    assert found[0] == found[1] == f"{here}\n".encode()
    assert len({plan for _, plan in here}) == 12


GATHER = """
import sys, torch
from types import SimpleNamespace
from sglang_glue.defrag.ranks import ranks_of
rank, path = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
scheduler = SimpleNamespace(ps=SimpleNamespace(tp_size=2), tp_cpu_group=torch.distributed.group.WORLD)
print(ranks_of(scheduler).gather([rank, True, 7]))
"""


def test_two_processes_see_the_values_of_both(tmp_path: Any) -> None:
    command = [sys.executable, "-c", GATHER]
    both = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE)
        for rank in (0, 1)
    ]
    outputs = [one.communicate(timeout=60)[0] for one in both]
    assert outputs == [b"[[0, 1, 7], [1, 1, 7]]\n"] * 2


def test_a_rank_on_its_own_asks_nobody() -> None:
    from types import SimpleNamespace

    from sglang_glue.defrag.ranks import difference, ranks_of

    assert ranks_of(SimpleNamespace()).gather([3, 4]) == [[3, 4]]
    assert difference(("a", "b"), [[1, 2], [1, 2]]) is None
    assert difference(("a", "b"), [[1, 2], [1, 5]]) == "ranks differ in b: 2, 5"


class Meeting:
    """Ranks as threads of this process; a rank that does not come breaks the meeting within seconds."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.values: list[list[int]] = [[] for _ in range(size)]
        self.met = 0

    def gather(self, rank: int, values: Sequence[int]) -> list[list[int]]:
        self.values[rank] = [int(v) for v in values]
        self.barrier.wait()
        found = list(self.values)
        self.met += rank == 0
        self.barrier.wait()
        return found


def run_ranks(meeting: Meeting, steps: int, disturb: Any = None) -> list[Any]:
    """An agent over a simulated server a rank, each in a thread; ``disturb(rank, step, backend)`` comes first."""
    from sglang_glue.defrag.settings import DefragSettings, Tier
    from sglang_glue.defrag.sglang_agent import Agent

    agents: list[Any] = [None] * meeting.size
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            sim, backend = real_server("sort", 3)
            scheduler = scheduler_of(sim, backend)
            agent = Agent(
                scheduler,
                DefragSettings(Tier.RELOCATE, 96 * 48, 4, 64.0, 128.0, 0),
                backend.allocator.kdtree_counters,
            )
            agent.enable_relocation()
            agent.ranks = type(
                "Here", (), {"size": 2, "gather": lambda self, values: meeting.gather(rank, values)}
            )()
            agents[rank] = agent
            for step in range(steps):
                if disturb:
                    disturb(rank, step, backend)
                scheduler.refresh()
                assert not agent.before_step()
                sim.step()
            sim.check()
        except BaseException as error:
            failed.append(error)
            meeting.barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(meeting.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return agents


@pytest.mark.sglang
@needs_sglang[1]
def test_equal_ranks_relocate_together() -> None:
    agents = run_ranks(meeting := Meeting(2), 120)
    first, second = agents
    assert first.counters.relocations == second.counters.relocations > 5
    assert first.counters.last_plan == second.counters.last_plan
    assert meeting.met > 120 // 4, "every look and every plan is compared"


@pytest.mark.sglang
@needs_sglang[1]
def test_a_rank_that_lost_a_slot_ends_relocation_on_all() -> None:
    lost: list[Any] = []

    def disturb(rank: int, step: int, backend: Any) -> None:
        if rank == 1 and step == 60:
            lost.append(backend.allocator.alloc(1))
        if rank == 1 and step == 110:  # so that the simulator's own books balance
            backend.allocator.free(lost.pop())

    agents = run_ranks(Meeting(2), 120, disturb)
    assert all(agent.controller is None for agent in agents)
    assert agents[0].unsupported == agents[1].unsupported
    assert agents[0].unsupported.startswith("ranks differ in ")
    assert agents[0].counters.relocations == agents[1].counters.relocations > 0
    assert all(sum(agent.counters.refused.values()) == 1 for agent in agents)


@pytest.mark.sglang
@needs_sglang[1]
def test_one_rank_that_cannot_relocate_keeps_the_others_from_it() -> None:
    from sglang_glue.defrag.settings import DefragSettings, Tier
    from sglang_glue.defrag.sglang_agent import Agent

    sim, backend = real_server("sort", 3)
    scheduler = scheduler_of(sim, backend)
    agent = Agent(scheduler, DefragSettings(Tier.RELOCATE), backend.allocator.kdtree_counters)
    other_cannot = type("Ranks", (), {"size": 2, "gather": lambda self, values: [list(values), [0]]})()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang_glue.defrag.sglang_agent.ranks_of", lambda scheduler: other_cannot)
        agent.enable_relocation()
    assert agent.controller is None and agent.report()["relocation"] == "another rank cannot relocate"
