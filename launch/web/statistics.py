"""Computes statistics of sources for the page, in a short-lived process that returns its memory."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from data_pipeline.config import ChosenSource
from data_pipeline.inspect.count import count_sources
from data_pipeline.inspect.facts import FactsFile
from moonvit3d.geometry import PatchLimits

_KEPT = 16

Choices = Mapping[str, ChosenSource | None]


class Statistics:
    """Counts each set of sources once, one set at a time; thread-safe.

    Args:
        limits: patch limits for token counts.
        seq_len: tokens per row; None without a configuration.
        choices: source name -> samples that the configuration selects.
    """

    def __init__(self, limits: PatchLimits, seq_len: int | None, choices: Choices) -> None:
        self._limits, self._seq_len, self._choices = limits, seq_len, dict(choices)
        self._pages: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, files: Sequence[FactsFile], against: FactsFile | None = None) -> str:
        """Return the statistics of sources as HTML.

        Args:
            files: facts of the sources.
            against: facts to compare the single source with.

        Raises:
            FactsError: a file cannot be read.
        """
        other = () if against is None else ("against", against.about["content_hash"])
        key = (*(f"{one.name} {one.about['content_hash']}" for one in files), *other)
        with self._lock:
            if key not in self._pages:
                asked = (list(files), against, self._limits, self._seq_len, self._choices)
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    self._pages[key] = process.submit(counted, *asked).result()
                if len(self._pages) > _KEPT:
                    self._pages.popitem(last=False)
            self._pages.move_to_end(key)
            return self._pages[key]


def counted(
    files: Sequence[FactsFile],
    against: FactsFile | None,
    limits: PatchLimits,
    seq_len: int | None,
    choices: Choices,
) -> str:
    """Count sources and return the HTML of the page; runs in the other process."""
    from launch.pages.count_page import count_body

    named = {one.name: one for one in files}
    other = None if against is None else (files[0].name, against)
    found = count_sources(named, limits, seq_len, choices, (), other)
    return "\n".join(count_body(found))
