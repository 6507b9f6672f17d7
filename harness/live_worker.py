"""One mode of a live run in a process of its own: an SGLang engine, its batches, its timings, one JSON result.

Started as `python -m harness.live_worker SPEC MODEL RESULT`, where SPEC is a `LiveSpec` as JSON and stdin holds the
prompts of a gap run, if it is one. RESULT is written again after each part, `complete` only in the last; beside it
lies a file of lines on how far it is.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from harness.live_accepted import record_accepted
from harness.live_engine import SETTLE_S, engine_options, flush, generate, greedy
from harness.live_model import register_weights
from harness.live_prompts import churn_batches, repeated_batch
from harness.live_spec import LiveSpec
from harness.live_timing import time_length

Json = dict[str, Any]

if __name__ == "__mp_main__":  # a spawned process of the engine, about to load its plug-ins
    register_weights()
    record_accepted()


class Progress:
    """The result so far on disk, and one line a step beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = progress_file(path)
        self._started = time.monotonic()
        self.found: Json = {"complete": False, "batches": [], "timings": []}

    def say(self, line: str) -> None:
        with self._lines.open("a") as file:
            file.write(f"{time.monotonic() - self._started:6.1f} s: {line}\n")
        self.write()

    def write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.found))
        partial.replace(self._path)


def progress_file(result: Path) -> Path:
    """Where the worker that writes `result` says how far it is."""
    return result.with_suffix(".progress")


def run_all(engine: Any, spec: LiveSpec, progress: Progress) -> None:
    """Churn, then repetitions, then timings."""
    batches = churn_batches(spec)
    for number, batch in enumerate(batches, 1):
        progress.found["batches"].append(generate(engine, batch, spec.new_tokens))
        if number % 8 == 0 or number == len(batches):
            progress.say(f"{number} of {len(batches)} batches")
    if spec.repeat:
        progress.found["repeats"] = repeat(engine, spec)
        progress.say(f"{spec.repeat} repetitions, {progress.found['repeats']['distinct']} distinct")
    for length in spec.lengths:
        timing = time_length(engine, spec, length)
        progress.found["timings"].append(timing)
        ms = "no verify step" if timing["ms_per_step"] is None else f"{timing['ms_per_step']:.2f} ms a verify step"
        progress.say(f"length {length}: {ms} ({timing['steps']} steps, prefill {timing['prefill_s']:.1f} s)")


def repeat(engine: Any, spec: LiveSpec) -> Json:
    """The same batch again and again, each time from an engine that remembers nothing."""
    batch, seen = repeated_batch(spec), []
    for _ in range(spec.repeat):
        flush(engine)
        seen.append(generate(engine, batch, spec.new_tokens))
    return {
        "runs": spec.repeat,
        "distinct": len({json.dumps(answers) for answers in seen}),
        "tokens": seen[0],
    }


def next_logprobs(engine: Any, prompts: list[list[int]]) -> list[dict[str, float]]:
    """After each prompt, the log-probabilities of the most likely tokens."""
    answers = engine.generate(input_ids=prompts, sampling_params=greedy(1), return_logprob=True, top_logprobs_num=8)
    tops = [answer["meta_info"]["output_top_logprobs"][0] for answer in answers]
    return [{str(token): float(logprob) for logprob, token, *_ in top} for top in tops]


def main(spec_text: str, model: str, result: str) -> None:
    import sglang

    spec = LiveSpec.from_json(spec_text)
    prompts = json.loads(sys.stdin.read() or "null")
    progress = Progress(Path(result))
    engine = sglang.Engine(**engine_options(spec, model))
    try:
        progress.found["sglang"] = sglang.__version__
        progress.say("the engine is up")
        if prompts is not None:
            progress.found["logprobs"] = next_logprobs(engine, prompts)
        else:
            run_all(engine, spec, progress)
        time.sleep(SETTLE_S)
        progress.found["complete"] = True
        progress.write()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
