"""A progress bar on stderr, on a terminal only, that steps aside while a result is printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar:
    """Progress over a known number of steps; silent where stderr is no terminal."""

    def __init__(self, total: int):
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def name(self, description: str) -> None:
        self._progress.update(self._task, description=description)

    def advance(self) -> None:
        self._progress.advance(self._task)

    def at(self, step: int) -> None:
        """Set the count, where a case ended early."""
        self._progress.update(self._task, completed=step)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the bar off the terminal while something else is written there."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()
