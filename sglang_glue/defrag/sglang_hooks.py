"""Where defragmentation enters SGLang: after a scheduler is built, and in that process alone.

``register`` is the plug-in's entry point. With ``KDTREE_DEFRAG`` off or unset it does nothing at all.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from sglang_glue.defrag.reserve import reserved_lengths
from sglang_glue.defrag.settings import DefragSettings, DefragSettingsError, Tier
from sglang_glue.defrag.unsupported import Unsupported

log = logging.getLogger(__name__)

TARGET = "sglang.srt.managers.scheduler.Scheduler.__init__"
SPEC_ALLOC = ("sglang.srt.speculative.eagle_utils", "alloc_for_spec_decode")
AGENT = "kdtree_defrag"
"""Attribute of the scheduler that holds its agent."""


def register() -> None:
    """Hook the scheduler's construction unless defragmentation is off. Ends the process on a bad setting."""
    try:
        settings = DefragSettings.from_env()
    except DefragSettingsError as error:
        raise SystemExit(f"verify-numba: {error}") from None
    if settings.tier is Tier.OFF:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, functools.partial(after_scheduler_init, settings), HookType.AFTER)


def after_scheduler_init(
    settings: DefragSettings, result: None, scheduler: Any, *args: Any, **kwargs: Any
) -> None:
    """Set defragmentation up in a scheduler. What it cannot handle is logged and left as SGLang made it."""
    from sglang_glue.defrag.sglang_agent import Agent
    from sglang_glue.defrag.sglang_allocator import activate_sorted

    if getattr(scheduler, AGENT, None) is not None:
        return
    try:
        sorting = activate_sorted(scheduler.token_to_kv_pool_allocator)
    except Unsupported as error:
        log.warning("verify-numba: no sorted allocation in this server: %s", error)
        return
    if settings.block:
        reserve_in_blocks(settings.block)
    agent = Agent(scheduler, settings, sorting)
    if settings.tier is Tier.RELOCATE:
        agent.enable_relocation()
    setattr(scheduler, AGENT, agent)
    agent.exporter.publish(agent.report())
    watch(scheduler, agent)


def watch(scheduler: Any, agent: Any) -> None:
    """Call the agent before each step, and launch nothing in a step when it asks for a quiet one."""
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    original = scheduler.get_next_batch_to_run

    @functools.wraps(original)
    def get_next_batch_to_run(running_batch: Any, last_batch: Any) -> Any:
        if agent.before_step():
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return original(running_batch=running_batch, last_batch=last_batch)

    scheduler.get_next_batch_to_run = get_next_batch_to_run


def reserve_in_blocks(block: int) -> None:
    """Make speculative requests grow by whole blocks, in this process."""
    import importlib

    module = importlib.import_module(SPEC_ALLOC[0])
    original = getattr(module, SPEC_ALLOC[1])
    if getattr(original, "kdtree_block", None) is not None:
        return

    @functools.wraps(original)
    def alloc_for_spec_decode(tree_cache: Any, req_to_token_pool: Any, **kwargs: Any) -> Any:
        _round_up(kwargs, tree_cache, req_to_token_pool, block)
        return original(tree_cache, req_to_token_pool, **kwargs)

    alloc_for_spec_decode.kdtree_block = block  # type: ignore[attr-defined]
    setattr(module, SPEC_ALLOC[1], alloc_for_spec_decode)


def _round_up(kwargs: dict[str, Any], tree_cache: Any, req_to_token_pool: Any, block: int) -> None:
    """Replace the lengths to allocate, in the call's arguments, by whole blocks."""
    allocator = tree_cache.token_to_kv_pool_allocator
    evictable = tree_cache.evictable_size()
    if kwargs["num_needed_tokens"] <= 0 or allocator.page_size != 1 or not isinstance(evictable, int):
        return
    on_host = kwargs["nxt_kv_lens_cpu"]
    current, wanted = kwargs["cur_kv_lens_cpu"].tolist(), on_host.tolist()
    width = req_to_token_pool.req_to_token.shape[1]
    room = allocator.available_size() + evictable
    lengths = reserved_lengths(current, wanted, block=block, width=width, room=room)
    if lengths != wanted:
        kwargs["nxt_kv_lens_cpu"] = on_host.new_tensor(lengths)
        kwargs["nxt_kv_lens"] = kwargs["nxt_kv_lens_cpu"].to(kwargs["nxt_kv_lens"].device, non_blocking=True)
        kwargs["num_needed_tokens"] = sum(lengths) - sum(current)
