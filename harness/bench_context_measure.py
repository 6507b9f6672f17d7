"""One context length: requests sent, streams read, speeds and meters of the stretch in which all of them decode."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness.bench_context_client import Client, ServerError, Stream
from harness.bench_context_meters import Gauge, Recorder

Row = dict[str, Any]


def measure(client: Client, prompts: Sequence[Sequence[int]], new_tokens: int, gauge: Gauge | None) -> Row:
    """Send all `prompts`, of one length, at the same time. Raises ServerError."""
    with Recorder(gauge) as recorder, ThreadPoolExecutor(len(prompts)) as pool:
        streams = list(pool.map(lambda prompt: client.generate(prompt, new_tokens), prompts))
    return make_row(len(prompts[0]), streams, recorder)


def make_row(context: int, streams: Sequence[Stream], recorder: Recorder) -> Row:
    """Speeds in tokens a second over all streams.

    Prefill: the tokens that were not cached, until the first token of each. Decode: tokens between the moment when
    the last stream has its first token and the moment when the first one ends.
    """
    start = max(stream.chunks[0].at for stream in streams)
    end = min(stream.chunks[-1].at for stream in streams)
    tokens = sum(tokens_at(stream, end) - tokens_at(stream, start) for stream in streams)
    if end <= start or tokens <= 0:
        raise ServerError("the streams never decoded at the same time: ask for more --new-tokens")
    cached = sum(_number(stream.meta, "cached_tokens") or 0 for stream in streams)
    waiting = start - min(stream.sent for stream in streams)
    return {
        "context": context,
        "concurrency": len(streams),
        "prefill_tokens_per_s": (context * len(streams) - cached) / waiting,
        "first_token_s": waiting,
        "cached_tokens": cached,
        "decode_tokens_per_s": tokens / (end - start),
        "decode_s": end - start,
        "new_tokens": sum(stream.chunks[-1].tokens for stream in streams),
        **_speculation(streams),
        **recorder.between(start, end),
        "meter_failure": recorder.failure or None,
    }


def tokens_at(stream: Stream, moment: float) -> int:
    """Tokens that had arrived by then."""
    return max((chunk.tokens for chunk in stream.chunks if chunk.at <= moment), default=0)


def _speculation(streams: Sequence[Stream]) -> Row:
    """Mean tokens accepted a verify step, and milliseconds a step, where the server tells."""
    steps = [_number(stream.meta, "spec_verify_ct") for stream in streams]
    if not all(steps):
        return {"accept_length": None, "verify_steps": None, "step_ms": None}
    done = [stream.chunks[-1].tokens for stream in streams]
    longest = max(stream.chunks[-1].at - stream.chunks[0].at for stream in streams)
    most = max(step for step in steps if step)
    return {
        "accept_length": sum(done) / sum(step for step in steps if step),
        "verify_steps": sum(step for step in steps if step),
        "step_ms": 1e3 * longest / most,
    }


def _number(meta: dict[str, Any], name: str) -> float | None:
    value = meta.get(name)
    return value if isinstance(value, int | float) else None
