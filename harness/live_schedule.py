"""The modes of a comparison, one after another, or at once where each has GPUs of its own."""

from __future__ import annotations

import queue
import sys
from concurrent.futures import ThreadPoolExecutor

from harness.errors import UsageError
from harness.live_run import LiveRunner, ModeRun


def labels_of(modes: list[str]) -> list[str]:
    """A name for each run: the mode, with a number where it comes again."""
    return [mode if mode not in modes[:i] else f"{mode}-{modes[:i].count(mode) + 1}" for i, mode in enumerate(modes)]


def run_modes(runner: LiveRunner, modes: list[str], groups: list[str | None]) -> tuple[list[ModeRun], list[str]]:
    """The finished runs in the order of `modes`, and what is to be said of those that failed.

    Each of `groups` (a value of CUDA_VISIBLE_DEVICES; None: as it is) serves one run at a time.
    """
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for group in groups:
        free.put(group)

    def one(label: str, mode: str) -> ModeRun | str:
        gpus = free.get()
        print(f"{label}: starting the engine", file=sys.stderr, flush=True)
        try:
            return runner.run(label, mode, gpus)
        except UsageError as error:
            return str(error)
        finally:
            free.put(gpus)

    with ThreadPoolExecutor(len(groups)) as pool:
        found = list(pool.map(one, labels_of(modes), modes))
    return [r for r in found if isinstance(r, ModeRun)], [r for r in found if isinstance(r, str)]
