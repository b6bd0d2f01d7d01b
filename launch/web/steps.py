"""Steps of a run for the page: their rows, what they are made of, and draws of a sample."""

from collections.abc import Iterator, Sequence
from typing import Any

from data_pipeline.config import DataConfig
from data_pipeline.plan.planner import Planner, State
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from launch.pages.blend_page import blend_body
from launch.pages.draws_page import draws_body
from launch.pages.pictures import Src
from launch.pages.rows_page import rows_body
from launch.pages.step_reader import StepReader
from launch.web.corpus import NotHere, ShownSource

MOST_ROWS, MOST_STEPS, MOST_EPOCHS = 16, 200, 12


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

    @property
    def first(self) -> int:
        """The first step of the run, from 1."""
        return self._reader.first + 1

    def rows(self, step: int, first: int, count: int, src: Src) -> Iterator[str]:
        """Yield rows of a step as HTML, read when the first part is asked for.

        Args:
            step: from 1, as in metrics.jsonl.
            first: row, from 0.
            count: of rows.
            src: takes the pictures.

        Raises:
            ValueError: no such step or row. IndexMismatch, StoreError: it cannot be read.
        """
        self._check(step, 1)
        total = self.config.rows_per_step
        if not 0 <= first < total:
            raise ValueError(f"row {first}: a step has rows 0 to {total - 1}")
        chosen = range(first, min(first + min(count, MOST_ROWS), total))
        return rows_body(self._reader.read(self._reader.before(step - 1), chosen), src)

    def blend(self, step: int, count: int) -> Iterator[str]:
        """Yield what some steps are made of, as HTML.

        Raises:
            ValueError: no such steps; DataUsedUp: the data end before.
        """
        if not 1 <= count <= MOST_STEPS:
            raise ValueError(f"{count} steps: expected 1 to {MOST_STEPS}")
        self._check(step, count)
        return blend_body(self._planner, self._reader.plans(step - 1, count))

    def _check(self, step: int, count: int) -> None:
        if not self.first <= step <= self.last - count + 1:
            raise ValueError(
                f"step {step}{f' and {count - 1} more' if count > 1 else ''}: {self.title} has "
                f"steps {self.first} to {self.last}"
            )

    def knows(self, name: str, content: str) -> bool:
        """Whether a source of this content is trained on."""
        return any(
            source.index.name == name and source.index.content_hash == content
            for source in self._planner.sources
        )

    def draws(
        self, shown: ShownSource, sample: int, epochs: Sequence[int], src: Src
    ) -> Iterator[str]:
        """Yield a sample in several epochs, as HTML.

        Raises:
            NotHere: the configuration has no such source. ValueError: it leaves the sample out.
            IndexMismatch, StoreError: it cannot be read.
        """
        for source in self._planner.sources:
            if source.index.name == shown.name:
                break
        else:
            raise NotHere(f"{self.title} does not train on source {shown.name!r}")
        if source.index.content_hash != shown.manifest["content_hash"]:
            raise NotHere(f"{self.title} has another content of source {shown.name!r}")
        document: dict[str, Any] = shown.document(sample)
        files = {one.number: shown.whole(sample, one) for one in shown.media(sample)}
        return draws_body(source, sample, document, files, self.config.limits, epochs, src)

    def tombstones(self) -> list[str]:
        """Return what is to be said of tombstones, in lines."""
        return self._planner.tombstones.notices()

    def close(self) -> None:
        """End its threads."""
        self._reader.close()
