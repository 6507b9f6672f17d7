"""Where defragmentation enters SGLang: what the hooks rest on, and the hooks in SGLang's own scheduler loop.

The sources of several releases can be read: the installed package, and the unpacked wheels that
VERIFY_NUMBA_TEST_SGLANG names, colon-separated (the folders that hold ``sglang/``).
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_glue.defrag import sglang_hooks, sglang_state
from tests.defrag.real import needs_sglang, real_server, scheduler_of

torch = pytest.importorskip("torch")


def releases() -> list[Path]:
    spec = importlib.util.find_spec("sglang")
    installed = [Path(spec.submodule_search_locations[0])] if spec and spec.submodule_search_locations else []
    unpacked = [Path(p) / "sglang" for p in os.environ.get("VERIFY_NUMBA_TEST_SGLANG", "").split(":") if p]
    return [*installed, *unpacked]


RELEASES = releases()
reads_sources = pytest.mark.skipif(
    not RELEASES, reason="no SGLang is installed and VERIFY_NUMBA_TEST_SGLANG names no sources"
)


def source(root: Path, name: str) -> str:
    return (root / "srt" / name).read_text()


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [c for c in found if name in (getattr(c.func, "id", None), getattr(c.func, "attr", None))]


@reads_sources
@pytest.mark.sglang
@pytest.mark.parametrize("root", RELEASES, ids=str)
class TestSources:
    def test_the_speculative_allocation_is_called_by_keyword(self, root: Path) -> None:
        tree = ast.parse(source(root, "speculative/eagle_utils.py"))
        found = calls(tree, "alloc_for_spec_decode")
        assert found
        for call in found:
            names = {k.arg for k in call.keywords}
            assert len(call.args) == 2
            assert names >= {"cur_kv_lens_cpu", "nxt_kv_lens", "nxt_kv_lens_cpu", "num_needed_tokens"}

    def test_the_loops_ask_for_the_next_batch_by_keyword(self, root: Path) -> None:
        text = source(root, "managers/scheduler.py")
        for call in calls(ast.parse(text), "get_next_batch_to_run"):
            assert {k.arg for k in call.keywords} == {"running_batch", "last_batch"} and not call.args
        plan = source(root, "managers/schedule_batch.py")
        fields = plan[plan.index("class NextBatchPlan") :].split("\n\n")[0]
        assert "batch_to_run: " in fields and "running_batch: " in fields

    def test_the_scheduler_has_the_attributes_that_are_read(self, root: Path) -> None:
        text = source(root, "managers/scheduler.py")
        read = [
            "token_to_kv_pool_allocator",
            "req_to_token_pool",
            "tree_cache",
            "running_batch",
            "last_batch",
        ]
        read += ["chunked_req", "waiting_queue", "result_queue", "draft_worker", "disaggregation_mode"]
        read += [name for name, _ in sglang_state.REFUSED_MODES]
        missing = [name for name in read if f"self.{name}" not in text]
        assert missing == []

    def test_requests_have_the_fields_that_are_read(self, root: Path) -> None:
        text = source(root, "managers/schedule_batch.py")
        for name in ("req_pool_idx", "kv_committed_len", "kv_allocated_len", "cache_protected_len"):
            assert name in text

    def test_the_supported_types_are_where_they_are_said_to_be(self, root: Path) -> None:
        for name in (sglang_state.TREE, sglang_state.ALLOCATORS[0], sglang_state.POOL, sglang_state.TABLE):
            module, cls = name.removeprefix("sglang.srt.").rsplit(".", 1)
            assert f"class {cls}" in source(root, module.replace(".", "/") + ".py")


class Recorder:
    """Stands for ``alloc_for_spec_decode``."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, tree_cache: Any, req_to_token_pool: Any, **kwargs: Any) -> None:
        self.seen.append(kwargs)


@pytest.fixture
def spec_module(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Recorder]:
    module, recorder = ModuleType("kdtree_fake_eagle_utils"), Recorder()
    module.alloc_for_spec_decode = recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sglang_hooks, "SPEC_ALLOC", (module.__name__, "alloc_for_spec_decode"))
    sglang_hooks.reserve_in_blocks(64)
    return module, recorder


def spec_call(
    module: Any, current: list[int], wanted: list[int], *, free: int = 1000, page_size: int = 1
) -> None:
    allocator = SimpleNamespace(page_size=page_size, available_size=lambda: free)
    tree = SimpleNamespace(token_to_kv_pool_allocator=allocator, evictable_size=lambda: 0)
    table = SimpleNamespace(req_to_token=torch.zeros(4, 500, dtype=torch.int32))
    cur, nxt = (torch.tensor(v, dtype=torch.int32) for v in (current, wanted))
    module.alloc_for_spec_decode(
        tree,
        table,
        reqs=[None] * len(current),
        req_pool_indices=None,
        cur_kv_lens=cur,
        cur_kv_lens_cpu=cur,
        nxt_kv_lens=nxt.clone(),
        nxt_kv_lens_cpu=nxt,
        num_needed_tokens=sum(wanted) - sum(current),
        batch=None,
    )


def test_speculative_requests_grow_by_blocks(spec_module: tuple[ModuleType, Recorder]) -> None:
    module, recorder = spec_module
    spec_call(module, [100, 200, 490], [103, 200, 495])
    seen = recorder.seen[0]
    assert seen["nxt_kv_lens_cpu"].tolist() == seen["nxt_kv_lens"].tolist() == [164, 200, 500]
    assert seen["num_needed_tokens"] == 74
    assert seen["nxt_kv_lens"].dtype == seen["nxt_kv_lens_cpu"].dtype == torch.int32
    assert seen["cur_kv_lens_cpu"].tolist() == [100, 200, 490]


@pytest.mark.parametrize("case", [{"free": 60}, {"page_size": 16}])
def test_a_short_or_paged_pool_is_left_alone(
    spec_module: tuple[ModuleType, Recorder], case: dict[str, int]
) -> None:
    module, recorder = spec_module
    spec_call(module, [100], [103], **case)
    assert recorder.seen[0]["nxt_kv_lens_cpu"].tolist() == [103]
    assert recorder.seen[0]["num_needed_tokens"] == 3


def test_the_growth_hook_goes_in_once(spec_module: tuple[ModuleType, Recorder]) -> None:
    module, _ = spec_module
    first = module.alloc_for_spec_decode
    sglang_hooks.reserve_in_blocks(64)
    assert module.alloc_for_spec_decode is first


class Batch:
    """A decode batch of SGLang's loop."""

    forward_mode = SimpleNamespace(is_extend=lambda: False)
    reqs: tuple[Any, ...] = ()

    def copy(self) -> Batch:
        return self


class Agent:
    """Asks for a quiet step in some iterations and notes what was in flight when it got one."""

    def __init__(self, loop: Any, ask: set[int]) -> None:
        self.loop, self.ask, self.quiet = loop, ask, []  # type: ignore[var-annotated]
        self.turn = 0
        self.pending = False

    def before_step(self) -> bool:
        self.turn += 1
        self.pending |= self.turn in self.ask
        if self.pending and not self.loop.result_queue:
            self.quiet.append(self.turn)
            self.pending = False
        return self.pending


class Loop(SimpleNamespace):
    """A scheduler reduced to what SGLang's overlap loop touches; it ends after some turns."""

    @property
    def gracefully_exit(self) -> bool:
        self.turns -= 1
        return bool(self.turns < 0)


@pytest.mark.sglang
@needs_sglang[1]
def test_draining_in_sglang_s_own_overlap_loop_loses_no_step() -> None:
    from sglang.srt.managers.schedule_batch import NextBatchPlan
    from sglang.srt.managers.scheduler import Scheduler

    launched: list[int] = []
    processed: list[int] = []
    batch = Batch()
    loop = Loop(
        turns=20,
        _engine_paused=False,
        running_batch=batch,
        last_batch=None,
        cur_batch_for_debug=None,
        enable_unified_memory=False,
        is_generation=False,
        request_receiver=SimpleNamespace(recv_requests=list),
        process_input_requests=lambda reqs: None,
        ingest_requests=lambda: None,
        is_disable_overlap_for_batch=lambda batch, last_batch: False,
        run_batch=lambda batch: launched.append(len(launched)) or launched[-1],
        process_batch_result=lambda batch, result: processed.append(result),
        on_idle=lambda: None,
        _apply_war_barrier=lambda: None,
    )
    loop.get_next_batch_to_run = lambda running_batch, last_batch: NextBatchPlan(
        batch_to_run=batch, running_batch=running_batch
    )
    agent = Agent(loop, ask={5, 12})
    sglang_hooks.watch(loop, agent)
    Scheduler.event_loop_overlap(loop)
    assert agent.quiet == [6, 13], "one idle turn each, then nothing is in flight"
    assert len(launched) == 18
    assert processed == launched[: len(processed)] and len(processed) >= 17


@pytest.mark.sglang
@needs_sglang[1]
def test_a_scheduler_is_set_up_once(spec_module: tuple[ModuleType, Recorder]) -> None:
    from sglang_glue.defrag.settings import DefragSettings, Tier

    _, backend = real_server("off")
    sim, _ = real_server("off")
    scheduler = scheduler_of(sim, backend)
    scheduler.get_next_batch_to_run = lambda running_batch, last_batch: "the original"
    settings = DefragSettings(Tier.RELOCATE)
    sglang_hooks.after_scheduler_init(settings, None, scheduler)
    agent = scheduler.kdtree_defrag
    hooked = scheduler.get_next_batch_to_run
    sglang_hooks.after_scheduler_init(settings, None, scheduler)
    assert scheduler.kdtree_defrag is agent and scheduler.get_next_batch_to_run is hooked
    assert agent.unsupported is None and agent.controller is not None
    assert type(backend.allocator).__name__ == "SortedTokenAllocator"
    assert hooked(running_batch=None, last_batch=None) == "the original"
    assert agent.step == 1


@pytest.mark.sglang
@needs_sglang[1]
def test_a_server_that_cannot_be_sorted_is_left_alone(
    spec_module: tuple[ModuleType, Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_glue.defrag.settings import DefragSettings, Tier

    paged = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=64))
    before = dict(vars(paged))
    sglang_hooks.after_scheduler_init(DefragSettings(Tier.SORT), None, paged)
    assert vars(paged) == before
    assert "no sorted allocation in this server: allocator types.SimpleNamespace" in caplog.text
