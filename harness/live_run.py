"""Run one mode of a live comparison in its own process and read back what it and the plug-in's counters say."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.live_spec import LiveSpec
from sglang_glue.settings import PREFIX
from sglang_glue.status import RUN_VARIABLE, read_statuses

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "sglang_glue" / "sitecustomize"
GROUP = "sglang.srt.plugins"
LAST_LINES = 15

Json = dict[str, Any]


@dataclass(frozen=True)
class ModeRun:
    """One finished run: `result` is the worker's JSON, `backends` the plug-in's reports (none in off)."""

    label: str
    mode: str
    result: Json
    backends: list[Json]


def refuse_without_engine() -> None:
    """Say at once what is missing for a live run. Raises UsageError."""
    if importlib.util.find_spec("sglang") is None:
        raise UsageError("live: SGLang is not installed in this Python environment")
    import torch

    if not torch.cuda.is_available():
        raise UsageError("live: no GPU that torch can use; a live engine needs one")


def plugin_paths() -> list[str]:
    """What PYTHONPATH needs: this checkout, and the sitecustomize folder where no entry point is installed."""
    installed = any(entry.value.startswith("sglang_glue") for entry in entry_points(group=GROUP))
    return [str(ROOT)] if installed else [str(SITE), str(ROOT)]


class LiveRunner:
    """Starts workers for one spec in one scratch folder; `settings` are further KDTREE_ variables."""

    def __init__(self, spec: LiveSpec, model: Path, folder: Path, settings: dict[str, str]) -> None:
        self._spec = spec
        self._model = model
        self._folder = folder
        self._settings = settings

    def run(self, label: str, mode: str) -> ModeRun:
        """One mode. Raises UsageError with the end of its log where the engine fails."""
        status = self._folder / f"status-{label}"
        result = self._worker(label, self._spec, {"KDTREE_VERIFY": mode, "KDTREE_STATUS": str(status)})
        backends = [b for s in read_statuses(status) for b in s.content.get("backends") or []]
        return ModeRun(label, mode, result, backends)

    def next_logprobs(self, spec: LiveSpec, prompts: list[list[int]]) -> list[dict[str, float]]:
        """Log-probabilities of the tokens after each prompt, from a plain engine."""
        result = self._worker("logprobs", spec, {"KDTREE_VERIFY": "off"}, json.dumps(prompts))
        return list(result["logprobs"])

    def _worker(self, label: str, spec: LiveSpec, settings: dict[str, str], stdin: str = "") -> Json:
        result, log = self._folder / f"{label}.json", self._folder / f"{label}.log"
        command = [sys.executable, "-m", "harness.live_worker", spec.to_json(), str(self._model), str(result)]
        with log.open("w") as output:
            process = subprocess.run(
                command,
                env=self._environment(settings),
                input=stdin,
                text=True,
                stdout=output,
                stderr=output,
                check=False,
            )
        if process.returncode or not result.exists():
            end = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
            raise UsageError(
                f"live: the engine of run {label!r} failed (exit {process.returncode}); {log} ends:\n{end}"
            )
        found: Json = json.loads(result.read_text())
        return found

    def _environment(self, settings: dict[str, str]) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k != RUN_VARIABLE}
        off = settings["KDTREE_VERIFY"] == "off"
        paths = [str(ROOT)] if off else plugin_paths()
        path = os.pathsep.join([*paths, *filter(None, [kept.get("PYTHONPATH")])])
        return {**kept, **({} if off else self._settings), **settings, "PYTHONPATH": path}
