"""A contender seen from the run: started, started again after its process was lost, given up when that goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from harness.bench_link import Link, Lost, Message

LOSSES_IN_A_ROW = 2


@dataclass(frozen=True)
class Limits:
    """Seconds that one answer may take: `start` to import and to compile, `step` to check or to time a shape."""

    start: float = 150.0
    step: float = 60.0


class Failed(Exception):
    """A contender did not do what it was asked; the message is one line for the table."""


class Contestant:
    """`connect` starts the process. A shape that took the process with it is not tried again."""

    def __init__(self, name: str, connect: Callable[[], Link], limits: Limits, say: Callable[[str], None]) -> None:
        self.name = name
        self._connect, self._limits, self._say = connect, limits, say
        self._link: Link | None = None
        self._lost_on: dict[str, str] = {}
        self._losses = 0
        self._given_up = ""

    @property
    def alive(self) -> bool:
        """It has a process, as far as anybody knows."""
        return self._link is not None

    def start(self) -> Link:
        """Begin to start the process, without waiting for it."""
        self._link = self._connect()
        self._link.begin({"do": "hello"})
        return self._link

    def missing(self) -> str | None:
        """Why the contender cannot run here, or None."""
        try:
            reason = self._hello()
        except Failed as failure:
            reason = str(failure)
        if reason:
            self.stop()
        return reason

    def warm(self, shape: Message, variants: list[Message]) -> float:
        """Compile for a shape; gives the seconds that it took. Raises Failed."""
        request = {"do": "warm", "shape": shape, "variants": variants}
        seconds = float(self._ask(request, self._limits.start)["seconds"])
        self._losses = 0
        return seconds

    def open(self, shape: Message, mode: str, variant: Message, id: int) -> Message:
        """Check and get ready; the reply of the worker. Raises Failed."""
        request = {"do": "open", "shape": shape, "mode": mode, "variant": variant, "id": id}
        return self._ask(request, self._limits.step)

    def time(self, shape: Message, id: int, seconds: float) -> list[float]:
        """Microseconds a call, one sample a round, of what was opened. Raises Failed."""
        request = {"do": "time", "shape": shape, "id": id, "seconds": seconds}
        samples: list[float] = self._ask(request, self._limits.step + seconds)["samples"]
        self._losses = 0
        return samples

    def close(self) -> None:
        """Let it free what was opened."""
        if self._link is not None:
            with contextlib.suppress(Failed):  # told when it is asked for something that counts
                self._ask({"do": "close"}, self._limits.step)

    def stop(self) -> None:
        if self._link is not None:
            self._link.stop()
            self._link = None

    def _ask(self, request: Message, limit: float) -> Message:
        shape = str(request.get("shape", ""))
        if self._given_up or shape in self._lost_on:
            raise Failed(self._given_up or self._lost_on[shape])
        link = self._link
        if link is None:
            if request["do"] in ("time", "close"):
                raise Failed("its process is gone, and with it what was opened")
            link = self.start()
            self._hello()
        link.begin(request)
        try:
            reply = link.finish(limit)
        except Lost as lost:
            self._lose(link, shape, str(lost))
            raise Failed(str(lost)) from None
        if reply.get("broken"):
            self._lose(link, shape, reply["error"])
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    def _hello(self) -> str | None:
        link = self._link
        assert link is not None
        try:
            reply = link.finish(self._limits.start)
        except Lost as lost:
            self._lose(link, "", str(lost))
            raise Failed(str(lost)) from None
        if "error" in reply:
            raise Failed(reply["error"])
        missing: str | None = reply["missing"]
        return missing

    def _lose(self, link: Link, shape: str, reason: str) -> None:
        link.stop()
        self._link = None
        self._say(f"{self.name}: process lost: {reason}")
        for line in link.tail():
            self._say(f"  {self.name} | {line}")
        if shape:
            self._lost_on[shape] = reason
        self._losses += 1
        if self._losses >= LOSSES_IN_A_ROW:
            self._given_up = f"given up after {self._losses} losses in a row; the last: {reason}"
