"""Run lengths of a server whose defragmentation is off, for the runs that the tiers are compared with.

The plug-in touches nothing in ``off``, so the comparison's own processes add an agent that measures and does no more.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_glue.defrag.settings import PREFIX, DefragSettings, Tier


def register_observer() -> None:
    """Hook the scheduler's construction in this process where the tier is off, before SGLang applies its hooks."""
    if os.environ.get(PREFIX, Tier.OFF.value) != Tier.OFF.value:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_glue.defrag.sglang_hooks import TARGET

    HookRegistry.register(TARGET, observe, HookType.AFTER)


def observe(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Measure a scheduler's run lengths every so many steps; nothing that it decides or allocates changes."""
    from sglang_glue.defrag.model_pools import SortCounters
    from sglang_glue.defrag.sglang_agent import Agent
    from sglang_glue.defrag.sglang_hooks import watch

    watch(scheduler, Agent(scheduler, DefragSettings.from_env(), SortCounters()))
