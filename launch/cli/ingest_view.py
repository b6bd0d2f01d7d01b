"""Shows the progress of `kimi-pretrain data ingest`, then its rejections."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table

from data_pipeline.ingest.shard_writer import IngestProgress
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.open import Store
from launch.cli.progress import shown

Show = Callable[[IngestProgress], None]


class Pace:
    """Speed since this start, excluding the work of an earlier, interrupted ingest."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: IngestProgress | None = None
        self.now = IngestProgress()

    def update(self, counts: IngestProgress) -> str:
        """Store new counts; return them with the speed, in one line."""
        first = self._first = self._first or counts
        self.now = counts
        megabytes = (counts.bytes - first.bytes) / self._seconds() / 1e6
        return (
            f"{self.samples_per_second():,.0f} samples/s  {megabytes:,.1f} MB/s  "
            f"{counts.shards} shards  {counts.rejected} rejected"
        )

    def samples_per_second(self) -> float:
        """Return samples per second since the start, including rejected samples."""
        first = self._first or self.now
        done = self.now.samples + self.now.rejected - first.samples - first.rejected
        return done / self._seconds()

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)


@contextmanager
def ingest_bar(title: str, total: int | None, pace: Pace) -> Iterator[Show]:
    """Show an ingest's progress; yield a function to call with new counts, which `pace` stores.

    `total` is None if the number of input samples is unknown.
    """

    def line(counts: IngestProgress) -> str:
        done, known = counts.samples + counts.rejected, f"{total:,}" if total else "?"
        return f"{title}: {done:,} of {known} samples  {pace.update(counts)}"

    def fields(counts: IngestProgress) -> dict[str, Any]:
        return {"completed": counts.samples + counts.rejected, "speed": pace.update(counts)}

    counter = MofNCompleteColumn() if total else TextColumn("{task.completed}")
    columns = (counter, TextColumn("{task.fields[speed]}"))
    with shown(title, total, line, fields, *columns, speed="") as show:
        yield show


def rejections(store: Store, name: str) -> dict[str, tuple[int, str]]:
    """Return the reasons for rejections in a finished source, most frequent first.

    Returns:
        {reason: (number of samples, key and detail of the first)}.
    """
    found: dict[str, tuple[int, str]] = {}
    for line in store.get(f"{name}/rejected.jsonl").splitlines():
        told = parse_json(line, f"{name}/rejected.jsonl")
        count, first = found.get(told["reason"], (0, f"{told['key']}: {told['detail']}"))
        found[told["reason"]] = count + 1, first
    return dict(sorted(found.items(), key=lambda item: (-item[1][0], item[0])))


def print_rejections(found: dict[str, tuple[int, str]], where: str) -> None:
    """Print a table of the rejections, if any."""
    if not found:
        return
    table = Table(title=f"rejected (all of them: {where}/rejected.jsonl)", title_justify="left")
    table.add_column("reason")
    table.add_column("samples", justify="right")
    table.add_column("the first", overflow="fold")
    for reason, (count, first) in found.items():
        # A key may hold a lone surrogate, which cannot be encoded.
        table.add_row(reason, f"{count:,}", first.encode(errors="backslashreplace").decode())
    # With markup, rich would read brackets in a detail as style.
    Console(stderr=True, markup=False).print(table)
