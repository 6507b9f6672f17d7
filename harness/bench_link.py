"""The line to the process of one contender: requests out, replies in, with a limit on every wait."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, Protocol

Message = dict[str, Any]

ROOT = Path(__file__).parents[1]
STOP_S = 5.0
TAIL_BYTES, TAIL_LINES = 4000, 12


class Lost(Exception):
    """The process is gone, with its reason in one line."""


class Link(Protocol):
    """`begin` sends a request, `finish` waits for its reply at most `limit` seconds and raises Lost."""

    def begin(self, request: Message) -> None: ...

    def finish(self, limit: float) -> Message: ...

    def stop(self) -> None: ...

    def tail(self) -> list[str]:
        """The last lines that the process printed; to be asked for when it has ended."""
        ...


def _environment() -> dict[str, str]:
    """This checkout first, whatever the working folder is."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


class ProcessLink:
    """A process that runs harness.bench_worker; what it prints goes to `log`, or to a file that nobody keeps."""

    def __init__(self, config: Message, log: Path | None = None) -> None:
        self._log: IO[bytes] = log.open("a+b") if log else tempfile.TemporaryFile()
        self._doing = "start"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.bench_worker"],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._write(config)

    def begin(self, request: Message) -> None:
        self._doing = request["do"]
        self._write(request)

    def finish(self, limit: float) -> Message:
        try:
            line = self._replies.get(timeout=limit)
        except queue.Empty:
            self.stop()
            raise Lost(f"no answer to {self._doing} in {limit:g} s, killed{self._last_words()}") from None
        if line is None:
            raise Lost(self._death())
        reply: Message = json.loads(line)
        return reply

    def stop(self) -> None:
        """End the process: by the end of its input, and by force where that does not help."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it may be gone already
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may hold it for longer
                self._process.wait(STOP_S)

    def _write(self, message: Message) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a process that is gone is found out when its reply is waited for
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def _death(self) -> str:
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.stop()
            return f"its process closed its line in {self._doing}{self._last_words()}"
        end = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"its process ended in {self._doing} with {end}{self._last_words()}"

    def tail(self) -> list[str]:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip().splitlines()[-TAIL_LINES:]

    def _last_words(self) -> str:
        lines = self.tail()
        return f"; its last line: {lines[-1].strip()[:200]}" if lines else ""
