"""A child process with a time limit, a log and a file of progress lines; nothing of it survives its end."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.25

_groups: set[int] = set()
_stopped = threading.Event()


def run_process(
    command: list[str],
    *,
    env: dict[str, str],
    stdin: str,
    log: Path,
    progress: Path,
    say: Callable[[str], None],
    timeout_s: float,
) -> str:
    """Run to the end, passing new lines of `progress` to `say`; returns what went wrong, or ''.

    The child leads a process group of its own, which is killed when it ends or its time is up.
    """
    if _stopped.is_set():
        return "stopped"
    with log.open("w") as output, tempfile.TemporaryFile("w+") as given:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(command, env=env, stdin=given, stdout=output, stderr=output, start_new_session=True)
        _groups.add(process.pid)
        try:
            ended = _watch(process, progress, say, time.monotonic() + timeout_s)
        finally:
            _kill(process.pid)
            process.wait()
            _groups.discard(process.pid)
    if ended:
        return "" if process.returncode == 0 else f"exit {process.returncode}"
    return f"not done after {timeout_s:.0f} s, killed"


@contextmanager
def processes_end_with_this() -> Iterator[None]:
    """Around everything that calls `run_process`, in the main thread: SIGTERM and SIGINT kill every child group first.

    An engine would keep its GPU memory otherwise, and threads that wait for it would keep this process.
    """

    def leave(number: int, frame: object) -> None:
        _stopped.set()
        for group in list(_groups):
            _kill(group)
        raise SystemExit(128 + number)

    _stopped.clear()
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(process: subprocess.Popen[bytes], progress: Path, say: Callable[[str], None], deadline: float) -> bool:
    """Whether it ended by itself."""
    said = 0
    while True:
        ended = process.poll() is not None
        lines = progress.read_text().splitlines() if progress.exists() else []
        for line in lines[said:]:
            say(line)
        said = len(lines)
        if ended or time.monotonic() > deadline:
            return ended
        time.sleep(POLL_S)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)  # a group keeps its leader's id, also when the leader is gone
    except ProcessLookupError:
        pass
