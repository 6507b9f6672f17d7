"""The process of one contender: it makes the same inputs as every other, and measures when it is told to.

A contender that ends in a GPU error, in a signal or in a loop takes only this process with it. Requests and replies are
one JSON object a line: `hello`, `warm`, `open`, `time`, `close`. What kernels and compilers print goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.bench_inputs import Coldness, Workload, fill_pool, make_pool
from harness.bench_measure import Opened, References, open_contender
from harness.bench_shapes import BenchShape
from harness.bench_subject import NAME as SUBJECT
from harness.bench_subject import Variant, prepare_subject
from harness.peers import Peer, find_peer
from harness.peers.base import Contender, PeerRefused, first_line
from harness.timer import take_pass

Message = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """What a process needs to make its inputs; the same for all but `contender`."""

    contender: str
    device: str
    seed: int
    pool_slots: int
    cold_bytes: int
    min_sets: int

    def as_json(self) -> Message:
        return asdict(self)


class Worker:
    """Answers requests for one contender, ours or a peer."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._device = torch.device(config.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._peer: Peer | None = None if config.contender == SUBJECT else find_peer(config.contender)
        self._pool: torch.Tensor | None = None
        self._shape: BenchShape | None = None
        self._work: Workload | None = None
        self._references: References | None = None
        self._opened: dict[int, Opened] = {}

    def answer(self, request: Message) -> Message:
        """The reply to one request; `error` in it says what went wrong, `broken` that the GPU is beyond use."""
        handle: Callable[[Message], Message] = getattr(self, f"_{request['do']}")
        try:
            with torch.inference_mode():
                return handle(request)
        except PeerRefused as refusal:
            return {"error": str(refusal)}
        except Exception as error:  # noqa: BLE001 - a kernel may fail in any way; the run goes on
            traceback.print_exc()
            kind = "" if isinstance(error, ValueError) and self._peer is None else f"{type(error).__name__}: "
            return {"error": f"{kind}{first_line(error)}", "broken": self._broken()}

    def _hello(self, request: Message) -> Message:
        return {"missing": self._peer.available(self._device) if self._peer else None}

    def _warm(self, request: Message) -> Message:
        """Compile: one call of each variant."""
        start = time.perf_counter()
        work = self._workload(BenchShape.from_json(request["shape"]))
        for variant in request["variants"]:
            self._bind(work, Variant(**variant))[0].calls[0]()
            self._synchronize()
        return {"seconds": time.perf_counter() - start}

    def _open(self, request: Message) -> Message:
        """Check and capture. The reply has a `mode` only if there is something to time."""
        work = self._workload(BenchShape.from_json(request["shape"]))
        contender, plan = self._bind(work, Variant(**request["variant"]))
        assert self._references is not None
        opened = open_contender(contender, self._references, request["mode"])
        self._opened[request["id"]] = opened
        return {
            "plan": plan,
            "note": opened.note,
            "mask": contender.mask,
            "check": {**opened.check.as_json(), "text": str(opened.check)},
            "mode": opened.stopwatch.mode if opened.stopwatch else None,
        }

    def _time(self, request: Message) -> Message:
        stopwatch = self._opened[request["id"]].stopwatch
        assert stopwatch is not None, "a red check is not timed"
        return {"samples": take_pass(stopwatch, request["seconds"])}

    def _close(self, request: Message) -> Message:
        self._opened.clear()
        self._free()
        return {}

    def _bind(self, work: Workload, variant: Variant) -> tuple[Contender, str]:
        if self._peer is None:
            return prepare_subject(work, variant)
        return self._peer.prepare(work), ""

    def _workload(self, shape: BenchShape) -> Workload:
        """The workload of `shape` on a pool that no earlier workload has left a trace in."""
        if self._work is None or shape != self._shape:
            self._opened.clear()
            self._work = self._references = None
            self._free()
            config = self._config
            if self._pool is None:
                self._pool = make_pool(config.pool_slots, self._device, config.seed)
            else:
                fill_pool(self._pool, config.seed)
            cold = Coldness(config.cold_bytes, config.min_sets)
            self._shape, self._work = shape, Workload(shape, self._pool, cold, config.seed)
            self._references = References(self._work)
        return self._work

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _broken(self) -> bool:
        try:
            self._synchronize()
        except RuntimeError:
            return True
        return False


def main() -> None:
    """Serve until stdin ends. The first line is the Config."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests = _requests()
    worker = Worker(Config(**requests.get()))
    while True:
        reply = worker.answer(requests.get())
        print(json.dumps(reply), file=replies, flush=True)
        if reply.get("broken"):
            os._exit(1)  # an orderly exit would hang or fail on a GPU in an error state


def _requests() -> queue.SimpleQueue[Message]:
    """Lines of stdin, parsed. When stdin ends the process ends at once, whatever it is doing: nobody waits for it."""
    found: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            found.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return found


if __name__ == "__main__":
    main()
