"""Shows progress of long commands: a bar on a terminal, occasional lines in a file or pipe.

Progress goes to stderr, so that stdout holds only the command's result.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from launch.pages.html import num_bytes

# Seconds between two lines without a terminal, such as in a job's log.
LINE_SECONDS = 30.0


class _Lines:
    """Prints at most one line per `seconds` (default `LINE_SECONDS`)."""

    def __init__(self, console: Console, seconds: float | None = None):
        self._console, self._told = console, time.monotonic()
        self._seconds = LINE_SECONDS if seconds is None else seconds

    def __call__(self, text: str) -> None:
        """Print a line, or drop it if the last one is too recent."""
        if time.monotonic() >= self._told + self._seconds:
            self._told = time.monotonic()
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def shown(
    title: str,
    total: float | None,
    line: Callable[..., str],
    fields: Callable[..., dict[str, Any]],
    *columns: ProgressColumn,
    **initial: Any,
) -> Iterator[Callable[..., None]]:
    """Show progress as a bar on a terminal, otherwise as occasional lines.

    Args:
        title: text before the bar.
        total: value at which the bar is full; None if it is not known yet.
        line: turns the arguments of the yielded function into a line of text.
        fields: turns the same arguments into an update of the bar
            (`rich.progress.Progress.update`).
        columns: columns between the bar and the remaining time.
        initial: initial values of the fields that the columns show.

    Yields:
        A function to call, from any thread, when progress was made.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(console)
        yield lambda *done: lines(line(*done))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total, **initial)
        yield lambda *done: bar.update(task, **fields(*done))


@contextmanager
def _counting_bar(
    title: str, column: ProgressColumn, said: Callable[[int], str]
) -> Iterator[Callable[[int, int], None]]:
    def line(done: int, total: int) -> str:
        return f"{title}: {said(done)} of {said(total)}"

    def fields(done: int, total: int) -> dict[str, Any]:
        return {"completed": done, "total": total}

    with shown(title, None, line, fields, column) as show:
        yield show


@contextmanager
def item_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a count of items; yield a function to call with (items done, total items)."""
    with _counting_bar(title, MofNCompleteColumn(), "{:,}".format) as show:
        yield show


@contextmanager
def total_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes done; yield a function to call, from any thread, with (bytes done, total)."""
    with _counting_bar(title, DownloadColumn(), num_bytes) as show:
        yield show


@contextmanager
def byte_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show bytes of a known total; yield a function to call with each number of new bytes."""
    lock, done = threading.Lock(), 0
    with total_bar(title) as show:

        def add(more: int) -> None:
            nonlocal done
            with lock:
                done += more
                show(done, total)

        yield add


@contextmanager
def share_bar(title: str) -> Iterator[Callable[[float, str], None]]:
    """Show a fraction; yield a function to call with (fraction from 0 to 1, current activity)."""

    def line(share: float, what: str) -> str:
        return f"{title}: {share:.0%}, {what}"

    def fields(share: float, what: str) -> dict[str, Any]:
        return {"completed": share, "description": what}

    with shown(title, 1.0, line, fields) as show:
        yield show
