"""What `kimi-pretrain data ingest` shows: a bar while it works, at the end what was left out."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from data_pipeline.ingest.shard_writer import IngestProgress
from data_pipeline.store.open import Store
from launch.cli.progress import Lines

Show = Callable[[IngestProgress], None]


class Pace:
    """How fast it goes since it was begun now, whatever an earlier run had done already."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: IngestProgress | None = None
        self.now = IngestProgress()

    def update(self, counts: IngestProgress) -> str:
        """Take new counts; returns them with the speed, in one line."""
        first = self._first = self._first or counts
        self.now = counts
        seconds = max(time.monotonic() - self._start, 1e-9)
        samples = (counts.samples + counts.rejected - first.samples - first.rejected) / seconds
        megabytes = (counts.bytes - first.bytes) / seconds / 1e6
        return (
            f"{samples:,.0f} samples/s  {megabytes:,.1f} MB/s  {counts.shards} shards  "
            f"{counts.rejected} rejected"
        )

    def samples_per_second(self) -> float:
        """Samples looked at in a second, over all this time."""
        first = self._first or self.now
        done = self.now.samples + self.now.rejected - first.samples - first.rejected
        return done / max(time.monotonic() - self._start, 1e-9)


@contextmanager
def shown(title: str, total: int | None, pace: Pace) -> Iterator[Show]:
    """Show counts as a bar on the terminal, or a line now and then where there is none.

    Args:
        title: stands before the bar.
        total: samples of the input, or None: then they are counted only.
        pace: keeps the counts.

    """
    console = Console(stderr=True)
    if console.is_terminal:
        counter = MofNCompleteColumn() if total else TextColumn("{task.completed}")
        columns = (TextColumn(title), BarColumn(), counter, TextColumn("{task.fields[speed]}"))
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task("", total=total, speed="")

            def draw(counts: IngestProgress) -> None:
                done = counts.samples + counts.rejected
                bar.update(task, completed=done, speed=pace.update(counts))

            yield draw
        return
    lines, known = Lines(console), f"{total:,}" if total else "?"

    def line(counts: IngestProgress) -> None:
        done = counts.samples + counts.rejected
        lines(f"{title}: {done:,} of {known} samples  {pace.update(counts)}")

    yield line


def rejections(store: Store, name: str) -> dict[str, tuple[int, str]]:
    """Return why samples of a finished source were left out, most frequent reason first.

    Returns:
        {reason: (how many, the first of them)}.

    """
    found: dict[str, tuple[int, str]] = {}
    for line in store.get(f"{name}/rejected.jsonl").splitlines():
        told = json.loads(line)
        count, first = found.get(told["reason"], (0, f"{told['key']}: {told['detail']}"))
        found[told["reason"]] = count + 1, first
    return dict(sorted(found.items(), key=lambda item: (-item[1][0], item[0])))


def print_rejections(found: dict[str, tuple[int, str]], where: str) -> None:
    """Print a table of them, if there are any."""
    if not found:
        return
    table = Table(title=f"rejected (all of them: {where}/rejected.jsonl)", title_justify="left")
    table.add_column("reason")
    table.add_column("samples", justify="right")
    table.add_column("the first", overflow="fold")
    for reason, (count, first) in found.items():
        # A name may hold half a surrogate pair, which no terminal takes.
        table.add_row(reason, f"{count:,}", first.encode(errors="backslashreplace").decode())
    # Without markup: a detail may hold brackets.
    Console(stderr=True, markup=False).print(table)
