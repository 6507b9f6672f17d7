"""Every rank's own account of the tokens that it accepted, to show that the ranks agree.

Each rank of an engine decides for itself which draft tokens are accepted; only the first one's answer is seen from
outside. So each scheduler keeps a running hash of what SGLang's verify sampling returned, on its GPU, and a thread
writes the last one that arrived in host memory to a file. Nothing waits for anything.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "VERIFY_NUMBA_LIVE_ACCEPTED"
TARGET = "sglang.srt.speculative.eagle_utils.eagle_sample"
PERIOD_S = 0.5
FACTOR = 6364136223846793005
"""Multiplier of Knuth's 64-bit linear congruential generator (MMIX); products wrap."""

Json = dict[str, Any]


class AcceptedHash:
    """Steps and an order-dependent hash of (predictions, accepted places), int64 [2] on `device`, and its mirror."""

    def __init__(self, device: Any) -> None:
        import torch

        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        self._mirror = torch.zeros(2, dtype=torch.int64, pin_memory=self._state.is_cuda)

    def add(self, predict: Any, accept_index: Any) -> None:
        """Enqueue one verify step: predict [bs * T], accept_index [bs, depth], integers."""
        import torch

        values = torch.cat([predict.flatten().long(), accept_index.flatten().long()]) + 2
        places = torch.arange(1, values.numel() + 1, device=values.device) * FACTOR
        self._state[1:].mul_(FACTOR).add_((values * places).sum())
        self._state[:1].add_(1)
        self._mirror.copy_(self._state, non_blocking=True)

    def read(self) -> Json:
        """The last state that arrived; makes no CUDA call."""
        steps, value = self._mirror.tolist()
        return {"steps": steps, "hash": f"{value & (2**64 - 1):016x}"}


class _Recorder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hash: AcceptedHash | None = None

    def after_sample(self, result: Any, *args: Any, **kwargs: Any) -> None:
        predict, _, accept_index = result
        if not accept_index.numel():  # an idle step
            return
        if self._hash is None:
            self._hash = AcceptedHash(predict.device)
            threading.Thread(target=self._loop, name="verify-numba-accepted", daemon=True).start()
        self._hash.add(predict, accept_index)

    def _loop(self) -> None:
        from sglang.srt.runtime_context import get_parallel

        path, written = self._folder / f"accepted-tp{get_parallel().tp_rank}.json", ""
        while True:
            time.sleep(PERIOD_S)
            text = json.dumps(self._hash.read()) if self._hash else ""
            if text != written:
                partial = path.with_suffix(".partial")
                partial.write_text(text)
                partial.replace(path)
                written = text


def record_accepted() -> None:
    """Hook SGLang's verify sampling in this process, where the run asks for it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, _Recorder(Path(folder)).after_sample, HookType.AFTER)


def read_accepted(folder: Path) -> dict[str, Json]:
    """By rank (`tp0`, …), the steps and the hash of what it accepted."""
    found = {}
    for path in sorted(folder.glob("accepted-*.json")):
        found[path.stem.removeprefix("accepted-")] = json.loads(path.read_text())
    return found
