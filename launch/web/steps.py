"""Steps of a run for the page: their rows, their mixture of sources, and draws of a sample."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from data_pipeline.config import DataConfig
from data_pipeline.decode import Decode
from data_pipeline.plan.planner import Planner, State
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from launch.pages.blend_page import StepSums, blend_body, sums_of
from launch.pages.draws_page import draws_body
from launch.pages.pictures import Src
from launch.pages.rows_page import rows_body
from launch.pages.step_reader import StepReader
from launch.pages.turns import ComeAgain
from launch.web.corpus import Medium, NotHere, ShownSource

MOST_ROWS, MOST_STEPS, MOST_EPOCHS = 16, 200, 12
SLICE_S = 2.0
"""Seconds that a request plans steps; the page then retries, and the planned steps are kept."""

MOST_BYTES = 256 << 20
"""Most bytes of memory for the rows of a page and their media files; one page at a time."""

_KEPT = 4096  # steps whose sums are kept


class Steps:
    """Steps of a configuration, or of a run as it was.

    Args:
        title: name of the configuration or run.
        config: data section of the configuration.
        last: last step that may be requested, from 1.
        planner: data planner of the run.
        store: store of the data.
        tokenizer: tokenizer of the sources.
        begin: state before the first step; None for a run that starts from scratch.

    Raises:
        IndexMismatch: a source was made with another tokenizer.
    """

    def __init__(
        self,
        title: str,
        config: DataConfig,
        last: int,
        planner: Planner,
        store: Store,
        tokenizer: Tokenizer,
        begin: State | None = None,
    ) -> None:
        self.title, self.config, self.last = title, config, last
        self._planner = planner
        self._reader = StepReader(planner, store, tokenizer, config.fetch_threads, begin)
        self._sums: dict[int, StepSums] = {}

    @property
    def first(self) -> int:
        """First step of the run, from 1."""
        return self._reader.first + 1

    def rows(self, step: int, first: int, count: int, src: Src, decode: Decode) -> Iterator[str]:
        """Return rows of a step as an iterator of HTML parts; read them immediately.

        Args:
            step: number from 1, as in metrics.jsonl.
            first: first row, from 0.
            count: number of rows.
            src: stores the pictures.
            decode: decodes a media file.

        Raises:
            ValueError: no such step or row. ComeAgain: the request has to be repeated.
            IndexMismatch, StoreError: the rows cannot be read.
        """
        until = time.monotonic() + SLICE_S
        self._check(step, 1)
        total = self.config.rows_per_step
        if not 0 <= first < total:
            raise ValueError(f"row {first}: a step has rows 0 to {total - 1}")
        chosen = range(first, min(first + min(count, MOST_ROWS), total))
        state = self._reader.before(step - 1, until)
        found = self._reader.read(state, chosen, until, MOST_BYTES, decode)
        return rows_body(found, src)

    def blend(self, step: int, count: int) -> Iterator[str]:
        """Return the mixture of sources in some steps, as an iterator of HTML parts.

        Raises:
            ValueError: no such steps. DataUsedUp: the data end before them. ComeAgain: the request
                has to be repeated.
        """
        until = time.monotonic() + SLICE_S
        if not 1 <= count <= MOST_STEPS:
            raise ValueError(f"{count} steps: expected 1 to {MOST_STEPS}")
        self._check(step, count)
        found: list[StepSums] = []
        planned = 0
        for number in range(step - 1, step - 1 + count):
            known = self._sums.get(number)
            if known is None:
                if planned and time.monotonic() > until:
                    raise ComeAgain(f"steps are being planned: done up to step {number:,}")
                known = sums_of(self._reader.plan(number, until), len(self._planner.indices))
                planned += 1
                self._keep(known)
            found.append(known)
        return blend_body(self._planner, found)

    def _keep(self, one: StepSums) -> None:
        if len(self._sums) >= _KEPT:
            self._sums.clear()
        self._sums[one.step] = one

    def _check(self, step: int, count: int) -> None:
        if not self.first <= step <= self.last - count + 1:
            raise ValueError(
                f"step {step}{f' and {count - 1} more' if count > 1 else ''}: {self.title} has "
                f"steps {self.first} to {self.last}"
            )

    def trains_on(self, shown: ShownSource) -> bool:
        """Return whether the steps train on a source, regardless of later redactions."""
        return any(
            (index.name, index.identity) == (shown.name, shown.identity)
            for index in self._planner.indices
        )

    def draws(
        self,
        shown: ShownSource,
        sample: int,
        epochs: Sequence[int],
        read: Callable[[ShownSource, int, Medium], bytes],
        src: Src,
        decode: Decode,
    ) -> Iterator[str]:
        """Return a sample in several epochs, as an iterator of HTML parts.

        Args:
            read: returns the bytes of a media file of the sample.
            src: stores the pictures.
            decode: decodes an image.

        Raises:
            NotHere: the configuration has no such source, or another content of it.
            ValueError: the configuration leaves the sample out. IndexMismatch, StoreError: the
                sample cannot be read. Also any error of `read`.
        """
        for source in self._planner.sources:
            if source.index.name == shown.name:
                break
        else:
            raise NotHere(f"{self.title} does not train on source {shown.name!r}")
        if source.index.content_hash != shown.manifest["content_hash"]:
            raise NotHere(f"{self.title} has another content of source {shown.name!r}")
        document: dict[str, Any] = shown.document(sample)
        media = {one.number: one for one in shown.media(sample)}

        def file(number: int) -> bytes:
            return read(shown, sample, media[number])

        limits = self.config.limits
        return draws_body(source, sample, document, file, limits, epochs, src, decode)

    def tombstones(self) -> list[str]:
        """Return lines about the tombstones."""
        return self._planner.tombstones.notices()

    def close(self) -> None:
        """Stop the threads of the reader."""
        self._reader.close()
