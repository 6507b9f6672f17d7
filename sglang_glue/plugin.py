"""The entry point of the group `sglang.srt.plugins`: SGLang calls `register` first thing in each of its processes."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import sys
from typing import Any

from sglang_glue.settings import Mode, Settings, SettingsError

log = logging.getLogger(__name__)

_registered = False


def register() -> None:
    """Hook `TritonAttnBackend.__init__` unless the mode is off. Ends the process on a bad setting."""
    settings = checked_settings()
    if settings.mode is Mode.OFF:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_glue.backend import TARGET

    hook = hook_for(settings)
    if hook is not None:
        HookRegistry.register(TARGET, hook, HookType.AFTER)


def checked_settings() -> Settings:
    """The settings, or the end of the process: SGLang logs and swallows every exception of a plug-in but this one."""
    try:
        return Settings.from_env()
    except SettingsError as error:
        raise SystemExit(f"verify-numba: {error}") from None


def hook_for(settings: Settings) -> Any:
    """What to call after `TritonAttnBackend.__init__`: `hook(result, backend, model_runner, …)`.

    None where this process has one already, so that the entry point and sitecustomize may both be there.
    """
    global _registered
    if _registered:
        return None
    _registered = True
    from sglang_glue.install import Installer
    from sglang_glue.status import StatusFile

    try:
        status = StatusFile(settings.status_folder, _process(settings))
    except OSError as error:
        raise SystemExit(f"verify-numba: KDTREE_STATUS={str(settings.status_folder)!r}: {error.strerror}") from None
    if multiprocessing.parent_process() is None:
        atexit.register(_exit_line, settings)
    return Installer(settings, status).after_init


def _process(settings: Settings) -> dict[str, Any]:
    from sglang_glue.backend import version_of

    return {
        "mode": settings.mode.value,
        "sglang": version_of("sglang"),
        "python": sys.version.split()[0],
        "process": multiprocessing.current_process().name,
        "backends": [],
    }


def _exit_line(settings: Settings) -> None:
    from sglang_glue.summary import summary_lines

    for line in summary_lines(settings.status_folder):
        print(line, file=sys.stderr)
