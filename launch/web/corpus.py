"""The sources that a page shows: their manifests, facts, and indices in small pieces."""

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.cut import CutIndex
from data_pipeline.index.manifest import read_provenance
from data_pipeline.index.reads import medium_of, read_checked, read_samples
from data_pipeline.inspect.facts import FactsFile, write_facts
from data_pipeline.inspect.query import Facts
from data_pipeline.names import did_you_mean
from data_pipeline.store.addresses import endpoint_of
from data_pipeline.store.open import MissingKey, Span, Store
from moonvit3d.geometry import PatchLimits

Progress = Callable[[str], Any]
_MEMORY = "96MB"  # of DuckDB, for each of the sources whose facts are open
_OPEN = 6
_PIECE = 4 << 20
_LINES = 200  # of rejected.jsonl, on a page


class NotHere(ValueError):
    """There is no such source, sample or file."""


class Rejected(NamedTuple):
    """Rejected samples: numbers by reason, those that were asked for, and how many those are."""

    reasons: dict[str, int]
    lines: list[dict[str, Any]]
    matching: int


class Medium(NamedTuple):
    """A media file: its number, kind (of `moonvit3d.geometry`), bytes, and where they lie."""

    number: int
    kind: int
    size: int
    span: Span
    line: int


class ShownSource:
    """One source.

    Args:
        store: where it lies.
        name: of it.
        limits: under which tokens are counted.
        folder: of facts, and of the index in pieces.
        progress: of writing the facts.

    Raises:
        MissingKey, IndexMismatch, ValueError, OSError: as `write_facts`.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        limits: PatchLimits,
        folder: Path,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.name, self._store = name, store
        self.facts_file: FactsFile = write_facts(store, name, limits, folder, progress)[0]
        self.cut = CutIndex(store, name, folder)

    @property
    def manifest(self) -> dict[str, Any]:
        """Return the manifest as it was when the server began."""
        return self.cut.manifest

    @property
    def num_redacted(self) -> int:
        """Samples that were redacted."""
        return len(self.manifest.get("redacted", {}).get("samples", ()))

    def provenance(self) -> dict[str, Any] | None:
        """Return what it was made of."""
        return read_provenance(self._store, self.name)

    def around(self, sample: int) -> tuple[SourceIndex, int]:
        """Return the index around a sample, and the number of its first one.

        Raises:
            NotHere: there is no such sample.
        """
        if not 0 <= sample < self.cut.num_samples:
            raise NotHere(
                f"source {self.name!r}: no sample {sample}; it has {self.cut.num_samples:,}"
            )
        return self.cut.around(sample)

    def document(self, sample: int) -> dict[str, Any]:
        """Return a sample's document.

        Raises:
            IndexMismatch, StoreError, NotHere: it cannot be read.
        """
        index, first = self.around(sample)
        return read_samples(self._store, index, [sample - first])[0]

    def media(self, sample: int) -> list[Medium]:
        """Return the media files of a sample, in order."""
        index, first = self.around(sample)
        begin, end = (int(at) for at in index.item_ptr[sample - first : sample - first + 2])
        lines = [line for line in range(begin, end) if index.item_chunk[line] == 0]
        return [
            Medium(
                int(index.item_media[line]),
                int(index.item_kind[line]),
                int(index.item_length[line]),
                medium_of(index, line).span,
                line,
            )
            for line in lines
        ]

    def medium(self, sample: int, number: int) -> Medium:
        """Return one media file of a sample.

        Raises:
            NotHere: there is none.
        """
        for one in self.media(sample):
            if one.number == number:
                return one
        raise NotHere(f"source {self.name!r}, sample {sample}: it has no file {number}")

    def whole(self, sample: int, medium: Medium) -> bytes:
        """Return the bytes of a media file, which have the CRC-32 of the index."""
        index, _ = self.around(sample)
        return read_checked(self._store, [medium_of(index, medium.line)])[0]

    def part(self, medium: Medium, offset: int, length: int) -> bytes:
        """Return some bytes of a media file, as they lie there: a part has no checksum."""
        return self._store.get(medium.span.key, medium.span.offset + offset, length)

    def rejected(self, reason: str, key: str) -> Rejected:
        """Return what its ingest left out.

        Args:
            reason, key: that lines must have, or have in them; "" for all.
        """
        reasons, lines, matching = Counter[str](), list[dict[str, Any]](), 0
        for line in self._rejected_lines():
            one = json.loads(line)
            reasons[one["reason"]] += 1
            if reason in ("", one["reason"]) and key.lower() in str(one["key"]).lower():
                matching += 1
                if len(lines) < _LINES:
                    lines.append(one)
        return Rejected(dict(reasons.most_common()), lines, matching)

    def _rejected_lines(self) -> Iterator[bytes]:
        where = f"{self.name}/rejected.jsonl"
        try:
            info = self._store.head(where)
        except MissingKey:  # reindexed, or of an earlier version
            return
        rest = b""
        for offset in range(0, info.size, _PIECE):
            length = min(_PIECE, info.size - offset)
            *whole, rest = (rest + self._store.get(where, offset, length)).split(b"\n")
            yield from whole
        if rest:
            yield rest


class Corpus:
    """All sources under a root that are shown.

    Args:
        store: of the root.
        endpoint: it was opened with.
        names: of the sources.
        limits: under which tokens are counted.
        folder: of facts.
        progress: called with a source's name; returns a context that takes its progress.

    Raises:
        MissingKey, IndexMismatch, ValueError, OSError: as `write_facts`.
    """

    def __init__(
        self,
        store: Store,
        endpoint: str | None,
        names: Sequence[str],
        limits: PatchLimits,
        folder: Path,
        progress: Progress,
    ) -> None:
        self.store, self.limits = store, limits
        self.endpoint = endpoint_of(store.uri, endpoint)
        self.sources: dict[str, ShownSource] = {}
        for name in names:
            with progress(name) as show:
                self.sources[name] = ShownSource(store, name, limits, folder, show)
        self._facts: OrderedDict[str, Facts] = OrderedDict()
        self._lock = threading.Lock()

    def source(self, name: str) -> ShownSource:
        """Return a source by its name.

        Raises:
            NotHere: there is none; says which there are.
        """
        if name not in self.sources:
            raise NotHere(f"no source {name!r} here; {did_you_mean(name, list(self.sources))}")
        return self.sources[name]

    def facts(self, name: str) -> Facts:
        """Return the facts of a source, open; who has them may use them for as long as wanted."""
        source = self.source(name)
        with self._lock:
            if name not in self._facts:
                self._facts[name] = Facts(source.facts_file, threads=2, memory=_MEMORY)
                if len(self._facts) > _OPEN:
                    self._facts.popitem(last=False)  # closed once nobody asks it any more
            self._facts.move_to_end(name)
            return self._facts[name]

    @property
    def categories(self) -> list[str]:
        """The categories that there are, sorted."""
        return sorted({source.manifest["category"] for source in self.sources.values()})

    def chosen(self, source: str, category: str) -> list[str]:
        """Return the names of the sources that a page is about.

        Args:
            source: one by its name; "" for all.
            category: theirs; "" for all.

        Raises:
            NotHere: there is no such source, or none of the category.
        """
        if category not in ("", *self.categories):
            raise NotHere(
                f"no source of category {category[:40]!r} here; "
                f"{did_you_mean(category[:40], self.categories)}"
            )
        names = [self.source(source).name] if source else list(self.sources)
        return [name for name in names if category in ("", self.sources[name].manifest["category"])]
