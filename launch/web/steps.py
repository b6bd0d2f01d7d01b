"""Steps of a run for the page: their rows, what they are made of, and draws of a sample."""

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
"""So long a request plans steps; what it planned is kept, and the page comes again by itself."""

MOST_BYTES = 256 << 20
"""Memory that the rows of a page may take, with the media files in them; one page at a time."""

_KEPT = 4096  # steps whose sums are kept


class Steps:
    """The steps of one configuration, or of a run as it was.

    Args:
        title: what is shown: a configuration, or a run's folder.
        config: its data.
        last: the last step that may be asked for, from 1.
        planner: of it.
        store: of its data.
        tokenizer: of its sources.
        begin: state before its first step; None: it began with nothing.

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
        """The first step of the run, from 1."""
        return self._reader.first + 1

    def rows(self, step: int, first: int, count: int, src: Src, decode: Decode) -> Iterator[str]:
        """Yield rows of a step as HTML, read when the first part is asked for.

        Args:
            step: from 1, as in metrics.jsonl.
            first: row, from 0.
            count: of rows.
            src: takes the pictures.
            decode: a media file.

        Raises:
            ValueError: no such step or row. ComeAgain: ask again. IndexMismatch, StoreError: it
                cannot be read.
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
        """Yield what some steps are made of, as HTML.

        Raises:
            ValueError: no such steps; DataUsedUp: the data end before. ComeAgain: ask again.
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
        """Whether a source is trained on, whatever was redacted in it since."""
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
        """Yield a sample in several epochs, as HTML.

        Args:
            read: returns the bytes of a media file of the sample.
            src: takes the pictures.
            decode: an image.

        Raises:
            NotHere: the configuration has no such source. ValueError: it leaves the sample out.
            IndexMismatch, StoreError: it cannot be read. Whatever `read` does.
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
        """Return what is to be said of tombstones, in lines."""
        return self._planner.tombstones.notices()

    def close(self) -> None:
        """End its threads."""
        self._reader.close()
