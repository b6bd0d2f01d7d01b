"""Progress of long commands: a bar on a terminal; in a file or a pipe a line now and then.

All of it goes to stderr, so that what a command prints stays what was asked for.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

# Seconds between two lines where there is no terminal, such as in the log of a job.
LINE_SECONDS = 30.0


class Lines:
    """Prints a line, but not more often than every so many seconds."""

    def __init__(self, console: Console, seconds: float | None = None):
        self._console, self._told = console, time.monotonic()
        self._seconds = LINE_SECONDS if seconds is None else seconds

    def __call__(self, text: str) -> None:
        """Print a line if it is time for one."""
        if time.monotonic() >= self._told + self._seconds:
            self._told = time.monotonic()
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def item_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many of how many are done; yields what to call with (done, in all)."""
    with _bar(title, MofNCompleteColumn(), "{:,}".format) as show:
        yield show


@contextmanager
def total_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes done; yields what to call, from any thread, with (bytes done, bytes in all)."""
    with _bar(title, DownloadColumn(), num_bytes) as show:
        yield show


@contextmanager
def byte_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """As `total_bar` for a known total; yields what to call with each number of bytes done."""
    lock, done = threading.Lock(), 0
    with total_bar(title) as show:

        def add(more: int) -> None:
            nonlocal done
            with lock:
                done += more
                show(done, total)

        yield add


@contextmanager
def _bar(
    title: str, column: ProgressColumn, said: Callable[[int], str]
) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = Lines(console)
        yield lambda done, total: lines(f"{title}: {said(done)} of {said(total)}")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), column, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
