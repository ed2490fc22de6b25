"""Progress of long work, as a callback; and a bar on the terminal that is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class ProgressCallback(Protocol):
    """Told how far work has come: `done` of `total` bytes of the step `what`."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[ProgressCallback]:
    """A callback that draws one bar per step, on stderr unless told otherwise."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console or Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield report
