"""A streaming client of an SGLang server: one request in, timed chunks out.

Two interfaces: SGLang's own `/generate`, whose chunks count tokens and tell what speculation did, and the
OpenAI-compatible `/v1/completions`. Prompts are token ids, so that a context length is exact.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

APIS = ("generate", "openai")


class ServerError(Exception):
    """The server cannot be reached, refused the request or broke the stream; one line says how."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream: `at` seconds on the monotonic clock, `tokens` generated so far."""

    at: float
    tokens: int


@dataclass
class Stream:
    """One whole request. `meta` is the last chunk's `meta_info` or `usage`."""

    sent: float
    chunks: list[Chunk] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Client:
    """Base address such as http://127.0.0.1:30000; `timeout` in seconds for each read."""

    url: str
    api: str = "generate"
    timeout: float = 600.0
    api_key: str | None = None

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Stream:
        """Send one request and read its stream to the end. Raises ServerError."""
        body = _openai_body if self.api == "openai" else _generate_body
        path = "/v1/completions" if self.api == "openai" else "/generate"
        stream = Stream(sent=time.monotonic())
        for event in self._events(path, body(prompt, new_tokens, self._model())):
            _add(stream, event)
        if not stream.chunks:
            raise ServerError(f"{self.url}{path}: the stream held no token")
        return _settle(stream)

    def describe(self) -> dict[str, Any]:
        """What the server says of itself; empty where it says nothing."""
        for path in ("/server_info", "/get_server_info"):
            try:
                info = json.loads(self._open(path, None).read())
            except (ServerError, ValueError, OSError):
                continue
            return info if isinstance(info, dict) else {}
        return {}

    def check(self) -> None:
        """Raises ServerError unless something answers at the address."""
        self._open("/health" if self.api == "generate" else "/v1/models", None).close()

    def _model(self) -> str:
        if self.api != "openai":
            return ""
        try:
            return str(json.loads(self._open("/v1/models", None).read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self.url}/v1/models: names no model") from error

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream."""
        try:
            with self._open(path, body) as response:
                for raw in response:
                    text = raw.decode("utf-8", "replace").strip()
                    if not text.startswith("data:"):
                        continue
                    text = text.removeprefix("data:").strip()
                    if text == "[DONE]":
                        return
                    yield _event(text)
        except OSError as error:
            raise ServerError(f"{self.url}{path}: the stream broke: {error}") from error

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url.rstrip("/") + path, data, {"Content-Type": "application/json"}
        )
        if self.api_key:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        try:
            return urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            text = error.read(400).decode("utf-8", "replace").strip()
            raise ServerError(f"{self.url}{path}: HTTP {error.code} {error.reason}: {text}") from error
        except (urllib.error.URLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"{self.url}{path}: no answer: {reason}") from error


def _generate_body(prompt: Sequence[int], new_tokens: int, model: str) -> dict[str, Any]:
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}


def _openai_body(prompt: Sequence[int], new_tokens: int, model: str) -> dict[str, Any]:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": usage,
    }


def _event(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError as error:
        raise ServerError(f"the stream holds no JSON: {text[:80]!r}") from error
    if not isinstance(event, dict):
        raise ServerError(f"the stream holds {type(event).__name__}, expected objects: {text[:80]!r}")
    if event.get("error"):
        detail = event["error"]
        raise ServerError(str(detail.get("message", detail)) if isinstance(detail, dict) else str(detail))
    return event


def _add(stream: Stream, event: dict[str, Any]) -> None:
    """Count tokens by what the server says; a server that says nothing sends one token a chunk."""
    meta = event.get("meta_info") or event.get("usage") or {}
    stream.meta |= meta
    has_text = bool(event.get("meta_info") or event.get("choices"))
    before = stream.chunks[-1].tokens if stream.chunks else 0
    tokens = int(meta.get("completion_tokens") or (before + 1 if has_text else before))
    if has_text and tokens > before:
        stream.chunks.append(Chunk(time.monotonic(), tokens))


def _settle(stream: Stream) -> Stream:
    """Where chunks were counted as one token each, spread the total that the server told at the end over them."""
    total, counted = int(stream.meta.get("completion_tokens") or 0), stream.chunks[-1].tokens
    if total > counted:
        stream.chunks = [Chunk(c.at, round(c.tokens * total / counted)) for c in stream.chunks]
    return stream
