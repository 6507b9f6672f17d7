"""One tier of a live defragmentation run in a process of its own: an SGLang engine under churn, one JSON result.

Started as `python -m harness.defrag_live_worker SPEC MODEL RESULT [BASE]`, where SPEC is a `LiveSpec` as JSON and BASE
the result of the tier to compare with; for each answer that differs from it the engine is asked, with an empty cache,
how close the two tokens were.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from harness.defrag_live_jobs import Job, jobs_of
from harness.defrag_live_observer import register_observer
from harness.live_engine import SETTLE_S, engine_options, flush, greedy
from harness.live_model import register_weights
from harness.live_spec import LiveSpec
from harness.live_timing import time_length

Json = dict[str, Any]
POLL_S = 0.02
WAITING = 4
"""Requests that wait while the server is full, so that there is always one to admit."""

if __name__ == "__mp_main__":  # a spawned process of the engine, about to load its plug-ins
    register_weights()
    register_observer()


class Series:
    """The reports of the first rank over time, from the file that its agent rewrites."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = time.perf_counter()
        self.reports: list[Json] = []

    async def follow(self) -> None:
        """Collect until cancelled."""
        while True:
            self.poll()
            await asyncio.sleep(POLL_S)

    def poll(self) -> None:
        """Take up the report in the file if it is a new one."""
        for report in self.latest():
            if report["rank"] == "0" and report != (self.reports[-1]["report"] if self.reports else None):
                self.reports.append({"seconds": time.perf_counter() - self.began, "report": report})

    def latest(self) -> list[Json]:
        """What each rank says now."""
        found = []
        for path in sorted(self.folder.glob("defrag-*.json")):
            with contextlib.suppress(OSError, ValueError):  # replaced or removed as we read
                found.append(json.loads(path.read_text()))
        return found


async def churn(engine: Any, jobs: list[Job], series: Series, at_once: int) -> list[Json]:
    """Send all jobs, as many at once as fit and a few more; returns one record a job, in order."""
    door = asyncio.Semaphore(at_once)

    async def one(number: int, job: Job) -> Json:
        async with door:
            return await _request(engine, f"churn-{number}", job)

    following = asyncio.create_task(series.follow())
    try:
        return list(await asyncio.gather(*(one(i, job) for i, job in enumerate(jobs))))
    finally:
        following.cancel()


async def _request(engine: Any, rid: str, job: Job) -> Json:
    """One streamed request; the record has its tokens, or none where the client went away."""
    tokens: list[int] = []
    steps, gone = 0, False
    chunks = await engine.async_generate(
        input_ids=job.prompt, sampling_params=greedy(job.new_tokens), rid=rid, stream=True
    )
    async for chunk in chunks:
        tokens = list(chunk["output_ids"])
        steps = int(chunk["meta_info"].get("spec_verify_ct") or 0)
        if job.abort is not None and not gone and len(tokens) >= job.abort:
            gone = True
            engine.tokenizer_manager.abort_request(rid=rid)
    return {"aborted": gone, "tokens": None if gone else tokens, "steps": steps}


def first_difference(tokens: list[int], others: list[int]) -> int | None:
    """Where two answers part; None where they do not."""
    if tokens == others:
        return None
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def differences(engine: Any, jobs: list[Job], answers: list[Json], base: list[Json]) -> list[Json]:
    """Where answers differ from those of the base, and the log-probability gap of the two tokens there."""
    found: list[Json] = []
    prompts = []
    for number, (job, answer, other) in enumerate(zip(jobs, answers, base, strict=True)):
        if answer["tokens"] is None or other["tokens"] is None:
            continue
        at = first_difference(other["tokens"], answer["tokens"])
        if at is not None:
            pair = [one["tokens"][at] if at < len(one["tokens"]) else -1 for one in (other, answer)]
            found.append({"request": number, "position": at, "tokens": pair, "gap": None})
            prompts.append([*job.prompt, *other["tokens"][:at]])
    for one, likely in zip(found, next_logprobs(engine, prompts), strict=True):
        first, second = (likely.get(token) for token in one["tokens"])
        if first is not None and second is not None:
            one["gap"] = abs(first - second)
    return found


def next_logprobs(engine: Any, prompts: list[list[int]]) -> list[dict[int, float]]:
    """After each prompt, the log-probabilities of the most likely tokens; no row that was ever moved is read."""
    if not prompts:
        return []
    flush(engine)
    answers = engine.generate(input_ids=prompts, sampling_params=greedy(1), return_logprob=True, top_logprobs_num=8)
    tops = [answer["meta_info"]["output_top_logprobs"][0] for answer in answers]
    return [{int(token): float(logprob) for logprob, token, *_ in top} for top in tops]


class Progress:
    """What has been found so far, on disk after each part, and a line beside it."""

    def __init__(self, result: Path) -> None:
        self._result = result
        self._lines = result.with_suffix(".progress")
        self._began = time.perf_counter()
        self.found: Json = {"complete": False}

    def add(self, line: str, **found: Any) -> None:
        """Keep some findings and say that they are there."""
        self.found |= found
        partial = self._result.with_suffix(".partial")
        partial.write_text(json.dumps(self.found))
        partial.replace(self._result)
        with self._lines.open("a") as lines:
            lines.write(f"{time.perf_counter() - self._began:6.1f} s: {line}\n")


def serve(engine: Any, spec: LiveSpec, progress: Progress, base: str | None) -> None:
    """Churn, timings, and what differs from the base."""
    jobs = jobs_of(spec)
    engine.generate(input_ids=jobs[0].prompt, sampling_params=greedy(16))  # small kernels are built on first use
    progress.add("the first answer is there")
    series = Series(Path(os.environ["KDTREE_STATUS"]))
    answers = engine.loop.run_until_complete(churn(engine, jobs, series, spec.batch + WAITING))
    seconds = time.perf_counter() - series.began
    progress.add(f"{len(answers)} requests in {seconds:.1f} s", answers=answers, churn_s=seconds)
    timings = [time_length(engine, spec, length) for length in spec.lengths]
    series.poll()
    progress.add("timed", timings=timings, series=series.reports, ranks=series.latest())
    if base:
        others = json.loads(Path(base).read_text())["answers"]
        found = differences(engine, jobs, answers, others)
        progress.add(f"{len(found)} answers differ", differences=found)


def main(spec_text: str, model: str, result: str, base: str | None = None) -> None:
    import sglang

    spec, progress = LiveSpec.from_json(spec_text), Progress(Path(result))
    engine = sglang.Engine(**engine_options(spec, model))
    try:
        progress.add("the engine is up", sglang=sglang.__version__)
        serve(engine, spec, progress, base)
        time.sleep(SETTLE_S)
        progress.add("done", complete=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
