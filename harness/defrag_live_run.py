"""Run one tier of a live defragmentation comparison in its own process and read back all that it left."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.live_process import run_process
from harness.live_run import plugin_paths
from harness.live_spec import LiveSpec
from sglang_glue.settings import PREFIX
from sglang_glue.status import RUN_VARIABLE, read_statuses

LAST_LINES = 40

Json = dict[str, Any]


@dataclass(frozen=True)
class TierRun:
    """What one tier's engine left: ``result`` of its worker (empty if it had none), the verify plug-in's reports in
    ``backends``, and ``failure``, why the run is not complete, or None."""

    tier: str
    result: Json
    backends: list[Json]
    failure: str | None

    @property
    def live(self) -> list[Json]:
        """The reports over time in which requests were live."""
        return [one for one in self.result.get("series", []) if one["report"]["live_runs"]["tokens"]]

    @property
    def churned(self) -> Json | None:
        """The first rank's last report of the churn; what it did later, while steps were timed, is not in it."""
        reports = [one["report"] for one in self.result.get("series", []) if one["seconds"] <= self.result["churn_s"]]
        return reports[-1] if reports else None


class TierRunner:
    """Starts workers for one spec in one folder. ``settings`` are the KDTREE_ variables that all tiers share,
    ``timeout`` the seconds that an engine may take in all."""

    def __init__(self, spec: LiveSpec, model: Path, folder: Path, settings: dict[str, str], timeout: float) -> None:
        self._spec = spec
        self._model = model
        self._folder = folder
        self._settings = settings
        self._timeout = timeout

    def run(self, tier: str, base: str | None) -> TierRun:
        """One tier, compared with the finished run of tier ``base`` if there is one."""
        result, log, status = (self._folder / f"{tier}{end}" for end in (".json", ".log", "-status"))
        command = [sys.executable, "-m", "harness.defrag_live_worker", self._spec.to_json(), str(self._model)]
        command += [str(result), *([str(self._folder / f"{base}.json")] if base else [])]
        progress = self._folder / f"{tier}.progress"
        for old in (result, progress):
            old.unlink(missing_ok=True)
        shutil.rmtree(status, ignore_errors=True)
        ended = run_process(
            command,
            env=self._environment(tier, status),
            stdin="",
            log=log,
            progress=progress,
            say=lambda line: print(f"{tier}: {line}", file=sys.stderr, flush=True),
            timeout_s=self._timeout,
        )
        found: Json = json.loads(result.read_text()) if result.exists() else {}
        failure = None
        if not found.get("complete"):
            end = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
            failure = f"the engine failed ({ended or 'no result'}); {log} ends:\n{end}"
        backends = [b for s in read_statuses(status) for b in s.content.get("backends") or []]
        return TierRun(tier, found, backends, failure)

    def _environment(self, tier: str, status: Path) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k != RUN_VARIABLE}
        paths = [*plugin_paths(self._folder / "plugin"), *filter(None, [kept.get("PYTHONPATH")])]
        own = {"KDTREE_DEFRAG": tier, "KDTREE_STATUS": str(status), "PYTHONPATH": os.pathsep.join(paths)}
        own["PYTHONUNBUFFERED"] = "1"
        return {**kept, **self._settings, **own}
