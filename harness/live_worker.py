"""One mode of a live run in a process of its own: an SGLang engine, its batches, its timings, one JSON result.

Started as `python -m harness.live_worker SPEC MODEL RESULT`, where SPEC is a `LiveSpec` as JSON and stdin holds the
prompts of a gap run, if it is one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from harness.live_model import register_weights
from harness.live_prompts import churn_batches, timed_prompt
from harness.live_spec import LiveSpec

SETTLE_S = 2.5
"""Longer than the counter files' period: the last state is on disk before the engine kills its scheduler."""

if __name__ == "__mp_main__":  # a spawned process of the engine, about to load its plug-ins
    register_weights()


def engine_options(spec: LiveSpec, model: str) -> dict[str, Any]:
    """Arguments of `sglang.Engine`."""
    options: dict[str, Any] = {
        "model_path": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "page_size": 1,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": spec.memory,
        "context_length": spec.context_length,
        "max_running_requests": spec.batch,
        "disable_cuda_graph": not spec.graphs,
        "cuda_graph_max_bs_decode": spec.batch,
        "random_seed": spec.seed,
    }
    if spec.algorithm == "ngram":
        options |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": spec.T}
    elif spec.algorithm == "eagle":
        options |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": spec.steps,
            "speculative_eagle_topk": spec.topk,
            "speculative_num_draft_tokens": spec.T,
        }
    return options


def greedy(new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


def run_batches(engine: Any, spec: LiveSpec) -> list[list[list[int]]]:
    """The generated tokens of every churn batch."""
    found = []
    for batch in churn_batches(spec):
        answers = engine.generate(input_ids=batch, sampling_params=greedy(spec.new_tokens))
        found.append([answer["output_ids"] for answer in answers])
    return found


def time_length(engine: Any, spec: LiveSpec, length: int) -> dict[str, Any]:
    """Milliseconds a verify step behind a prefix of `length`: the first run fills the prefix cache."""
    prompt = timed_prompt(spec, length)
    engine.generate(input_ids=prompt, sampling_params=greedy(1))
    started = time.perf_counter()
    answer = engine.generate(input_ids=prompt, sampling_params=greedy(spec.new_tokens))
    elapsed = time.perf_counter() - started
    steps = answer["meta_info"].get("spec_verify_ct") or 0
    return {
        "length": length,
        "steps": steps,
        "ms_per_step": 1000 * elapsed / steps if steps else None,
        "tokens": answer["output_ids"],
    }


def next_logprobs(engine: Any, prompts: list[list[int]]) -> list[dict[str, float]]:
    """After each prompt, the log-probabilities of the most likely tokens."""
    answers = engine.generate(
        input_ids=prompts, sampling_params=greedy(1), return_logprob=True, top_logprobs_num=8
    )
    tops = [answer["meta_info"]["output_top_logprobs"][0] for answer in answers]
    return [{str(token): float(logprob) for logprob, token, *_ in top} for top in tops]


def main(spec_text: str, model: str, result: str) -> None:
    import sglang

    spec = LiveSpec.from_json(spec_text)
    prompts = json.loads(sys.stdin.read() or "null")
    engine = sglang.Engine(**engine_options(spec, model))
    try:
        found: dict[str, Any] = {"sglang": sglang.__version__}
        if prompts is not None:
            found["logprobs"] = next_logprobs(engine, prompts)
        else:
            found["batches"] = run_batches(engine, spec)
            found["timings"] = [time_length(engine, spec, length) for length in spec.lengths]
        Path(result).write_text(json.dumps(found))
        time.sleep(SETTLE_S)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
