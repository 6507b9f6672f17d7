"""A stand-in for an SGLang server on a loopback port: streams tokens at a chosen pace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """What the stub does. `per_step` tokens a chunk; `requests` holds what came in."""

    prefill_s: float = 0.02
    step_s: float = 0.004
    per_step: int = 2
    cached: int = 0
    speculates: bool = True
    fail_from: int | None = None
    break_after: int | None = None
    continuous: bool = True
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def serve(script: Script) -> Iterator[str]:
    """The base address, while the server runs."""

    class Handler(_Handler):
        plan = script

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    plan: Script

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        answers: dict[str, dict[str, Any]] = {
            "/health": {},
            "/server_info": {"tp_size": 1, "speculative_algorithm": "NGRAM", "secret": "not for results"},
            "/v1/models": {"data": [{"id": "stub"}]},
        }
        self._json(200 if self.path in answers else 404, answers.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.plan.requests.append((self.path, body))
        self.plan.keys.append(self.headers["Authorization"])
        prompt = body.get("input_ids") or body["prompt"]
        if self.plan.fail_from is not None and len(prompt) >= self.plan.fail_from:
            self._json(400, {"error": {"message": f"{len(prompt)} tokens is too long"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        wanted = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        time.sleep(self.plan.prefill_s)
        for event in self._events(wanted, len(prompt)):
            self.wfile.write(f"data: {event}\n\n".encode())
            self.wfile.flush()

    def _events(self, wanted: int, length: int) -> Iterator[str]:
        sent, steps = 1, 0
        yield self._chunk(sent, steps, length)
        while sent < wanted:
            if self.plan.break_after is not None and steps >= self.plan.break_after:
                yield json.dumps({"error": {"message": "scheduler died"}})
                return
            time.sleep(self.plan.step_s)
            sent, steps = min(wanted, sent + self.plan.per_step), steps + 1
            yield self._chunk(sent, steps, length)
        if not self.path.endswith("generate"):
            yield json.dumps({"choices": [], "usage": {"completion_tokens": sent}})
        yield "[DONE]"

    def _chunk(self, sent: int, steps: int, length: int) -> str:
        if self.path.endswith("generate"):
            meta = {"completion_tokens": sent, "prompt_tokens": length, "cached_tokens": self.plan.cached}
            if self.plan.speculates:
                meta["spec_verify_ct"] = steps
            return json.dumps({"text": "x", "meta_info": meta})
        usage = {"usage": {"completion_tokens": sent}} if self.plan.continuous else {}
        return json.dumps({"choices": [{"text": "x"}], **usage})

    def _json(self, code: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
