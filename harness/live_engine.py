"""The SGLang engine of a live run: its arguments, and the few calls that are made of it."""

from __future__ import annotations

import time
from typing import Any

from harness.live_spec import LiveSpec

FLUSH_S = 30.0
SETTLE_S = 2.5
"""A wait before an engine is shut down, longer than the counter files' period: the last state is on disk before the
engine kills its scheduler."""


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
        "max_total_tokens": spec.pool_tokens,
        # A prompt in one piece is prefilled by plain multi-head attention; later chunks would go through the
        # absorbed form, whose Triton kernel needs minutes behind 100k tokens.
        "chunked_prefill_size": -1,
        "max_running_requests": spec.batch,
        "disable_cuda_graph": not spec.graphs,
        "cuda_graph_max_bs_decode": spec.batch,
        "random_seed": spec.seed,
        "log_level": "info",
        "tp_size": spec.tp,
    }
    if spec.tp > 1:
        # Plain NCCL: one order of summation, and nothing that needs NVLink multicast or a kernel built on the spot.
        options |= {"disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}
    return {**options, **_speculation(spec), **dict(spec.engine)}


def _speculation(spec: LiveSpec) -> dict[str, Any]:
    if spec.algorithm == "ngram":
        return {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": spec.T}
    if spec.algorithm == "eagle":
        return {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": spec.steps,
            "speculative_eagle_topk": spec.topk,
            "speculative_num_draft_tokens": spec.T,
        }
    return {}


def greedy(new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


def generate(engine: Any, batch: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The generated tokens of a batch; its requests reach the scheduler in one message."""
    answers = engine.generate(input_ids=batch, sampling_params=greedy(new_tokens))
    return [list(answer["output_ids"]) for answer in answers]


def flush(engine: Any) -> None:
    """Empty the prefix cache, the pools and the n-gram corpus. Raises RuntimeError where the engine stays busy."""
    deadline = time.monotonic() + FLUSH_S
    while not getattr(engine.flush_cache(), "success", True):  # refused while the last step is still under way
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not become idle within {FLUSH_S:.0f} s")
        time.sleep(0.05)
