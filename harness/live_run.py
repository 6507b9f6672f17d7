"""Run one mode of a live comparison in its own process and read back what it and the plug-in's counters say."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.live_accepted import FOLDER_VARIABLE, read_accepted
from harness.live_process import run_process
from harness.live_spec import LiveSpec
from harness.live_worker import progress_file
from sglang_glue.settings import PREFIX
from sglang_glue.status import RUN_VARIABLE, read_statuses

ROOT = Path(__file__).resolve().parents[1]
GROUP = "sglang.srt.plugins"
ENTRY_POINTS = """[sglang.srt.plugins]
verify_numba = sglang_glue.plugin:register
verify_numba_defrag = sglang_glue.defrag.sglang_hooks:register
"""
LAST_LINES = 25

Json = dict[str, Any]


@dataclass(frozen=True)
class ModeRun:
    """One finished run: `result` is the worker's JSON, `backends` the plug-in's reports (none in off).

    `accepted` is, by rank, what that rank's verify sampling accepted (steps and a hash).
    """

    label: str
    mode: str
    result: Json
    backends: list[Json]
    accepted: dict[str, Json] = field(default_factory=dict)


def refuse_without_engine(gpus: int = 1) -> None:
    """Say at once what is missing for a live run on `gpus` GPUs. Raises UsageError."""
    if importlib.util.find_spec("sglang") is None:
        raise UsageError("a live run needs SGLang, which is not installed in this Python environment")
    import torch

    if not torch.cuda.is_available():
        raise UsageError("a live run needs a GPU that torch can use; there is none")
    if torch.cuda.device_count() < gpus:
        raise UsageError(f"live: --tp {gpus} needs as many GPUs, found {torch.cuda.device_count()}")


def plugin_paths(folder: Path) -> list[str]:
    """What PYTHONPATH needs so that SGLang finds the plug-ins of this checkout by itself.

    Where the package is not installed, a distribution of entry points alone is laid down in `folder`.
    """
    if any(entry.value.startswith("sglang_glue") for entry in entry_points(group=GROUP)):
        return [str(ROOT)]
    info = folder / "verify_numba-0+checkout.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verify-numba\nVersion: 0+checkout\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return [str(folder), str(ROOT)]


class LiveRunner:
    """Starts workers for one spec in one scratch folder; `settings` are further KDTREE_ variables.

    Args:
        timeout_s: a worker that takes longer is killed with all its processes.
        gpus: a value of CUDA_VISIBLE_DEVICES for runs that name none of their own; None: as it is.
    """

    def __init__(
        self,
        spec: LiveSpec,
        model: Path,
        folder: Path,
        settings: dict[str, str],
        timeout_s: float = 1800.0,
        gpus: str | None = None,
    ) -> None:
        self._spec = spec
        self._model = model
        self._folder = folder
        self._settings = settings
        self._timeout_s = timeout_s
        self._gpus = gpus

    def run(self, label: str, mode: str, gpus: str | None = None) -> ModeRun:
        """One mode. Raises UsageError with the end of its log where the engine fails."""
        status, accepted = self._folder / f"status-{label}", self._folder / f"accepted-{label}"
        for old in (status, accepted):
            shutil.rmtree(old, ignore_errors=True)
        accepted.mkdir(parents=True)
        variables = {"KDTREE_VERIFY": mode, "KDTREE_STATUS": str(status)}
        if self._spec.tp > 1:  # alone, a rank has nobody to agree with
            variables[FOLDER_VARIABLE] = str(accepted)
        result = self._worker(label, self._spec, variables, gpus)
        backends = [b for s in read_statuses(status) for b in s.content.get("backends") or []]
        return ModeRun(label, mode, result, backends, read_accepted(accepted))

    def next_logprobs(self, spec: LiveSpec, prompts: list[list[int]]) -> list[dict[str, float]]:
        """Log-probabilities of the tokens after each prompt, from a plain engine."""
        result = self._worker("logprobs", spec, {"KDTREE_VERIFY": "off"}, None, json.dumps(prompts))
        return list(result["logprobs"])

    def _worker(self, label: str, spec: LiveSpec, variables: dict[str, str], gpus: str | None, stdin: str = "") -> Json:
        result, log = self._folder / f"{label}.json", self._folder / f"{label}.log"
        for old in (result, progress_file(result)):
            old.unlink(missing_ok=True)
        command = [sys.executable, "-m", "harness.live_worker", spec.to_json(), str(self._model), str(result)]
        ended = run_process(
            command,
            env=self._environment(variables, gpus),
            stdin=stdin,
            log=log,
            progress=progress_file(result),
            say=lambda line: print(f"{label}: {line}", file=sys.stderr, flush=True),
            timeout_s=self._timeout_s,
        )
        found: Json = json.loads(result.read_text()) if result.exists() else {}
        if ended or not found.get("complete"):
            end = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
            raise UsageError(
                f"live: the engine of run {label!r} failed ({ended or 'no result'});"
                f" what it had measured is in {result}, {log} ends:\n{end}"
            )
        return found

    def _environment(self, variables: dict[str, str], gpus: str | None = None) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k != RUN_VARIABLE}
        off = variables["KDTREE_VERIFY"] == "off"
        paths = [str(ROOT)] if off else plugin_paths(self._folder / "plugin")
        path = os.pathsep.join([*paths, *filter(None, [kept.get("PYTHONPATH")])])
        gpus = gpus or self._gpus
        devices = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        settings = {} if off else self._settings
        return {**kept, **settings, **variables, **devices, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
