"""The sources that the page shows: their manifests, their facts, and their indices in small parts.

A source is read again when its manifest changes (`fresh`), so redacted samples are never shown.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.cut import CutIndex
from data_pipeline.index.manifest import (
    IndexMismatch,
    identity_of,
    manifest_key,
    read_manifest,
    read_provenance,
)
from data_pipeline.index.reads import document_of, medium_of, read_checked
from data_pipeline.inspect.document import describe, document_faults
from data_pipeline.inspect.facts import FactsFile, write_facts
from data_pipeline.inspect.problem import Fault
from data_pipeline.inspect.query import Facts
from data_pipeline.names import did_you_mean
from data_pipeline.store.addresses import endpoint_of
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.objects import in_threads
from data_pipeline.store.open import MissingKey, Span, Store, open_store
from launch.web.fresh import Fresh, manifests_of
from launch.web.rejected import RejectedList
from moonvit3d.geometry import PatchLimits

Progress = Callable[[str], Any]
PATIENCE_S = 10.0  # longest wait of a page for a store that makes no progress
_MEMORY = "96MB"  # limit of DuckDB for each source with open facts
_OPEN = 6
_THREADS = 16


class NotHere(ValueError):
    """The source, sample or file does not exist."""


class Medium(NamedTuple):
    """A media file: number, kind (see `moonvit3d.geometry`), bytes, location and index line."""

    number: int
    kind: int
    size: int
    span: Span
    line: int


class ShownSource:
    """One source.

    Args:
        store: store of the source, which has read its current manifest.
        name: name of the source.
        limits: patch limits for token counts.
        folder: folder for facts and for the parts of the index.
        progress: called while facts are written, with (samples done, total samples).

    Raises:
        MissingKey, IndexMismatch, ValueError, OSError: as for `write_facts`.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        limits: PatchLimits,
        folder: Path,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.name, self.store = name, store
        _check_shown(f"{store.uri}/{manifest_key(name)}", read_manifest(store, name))
        self.facts_file: FactsFile = write_facts(store, name, limits, folder, progress)[0]
        self.cut = CutIndex(store, name, folder)
        self.rejected = RejectedList(store, name)
        self._redacted = frozenset(self.manifest.get("redacted", {}).get("samples", ()))

    @property
    def manifest(self) -> dict[str, Any]:
        """Manifest of the source."""
        return self.cut.manifest

    @property
    def identity(self) -> str:
        """Identity of the source, which redactions do not change; see `SourceIndex.identity`."""
        return identity_of(self.manifest)

    @property
    def num_redacted(self) -> int:
        """Number of redacted samples."""
        return len(self._redacted)

    def provenance(self) -> dict[str, Any] | None:
        """Return the provenance of the source, or None if it has none."""
        return read_provenance(self.store, self.name)

    def around(self, sample: int) -> tuple[SourceIndex, int]:
        """Return the part of the index around a sample, and the number of its first sample.

        Raises:
            NotHere: there is no such sample.
        """
        if not 0 <= sample < self.cut.num_samples:
            raise NotHere(
                f"source {self.name!r}: no sample {sample}; it has {self.cut.num_samples:,}"
            )
        return self.cut.around(sample)

    def _there(self, sample: int) -> tuple[SourceIndex, int]:
        """Return the same as `around`; raise NotHere for a redacted sample."""
        index, first = self.around(sample)
        if sample in self._redacted:
            key = index.key_of(sample - first)
            raise NotHere(f"source {self.name!r}, sample {sample} ({key!r}): it was redacted")
        return index, first

    def document(self, sample: int) -> dict[str, Any]:
        """Return a sample's document.

        Raises:
            NotHere: there is no such sample, or it was redacted. IndexMismatch: the document does
                not match the index or the format. StoreError: it cannot be read.
        """
        index, first = self._there(sample)
        data = read_checked(self.store, [document_of(index, sample - first)])[0]
        found = describe(data, None)
        if isinstance(found, Fault):
            faults = [found]
        else:
            faults = document_faults(found, index, sample - first)
        if faults:
            raise IndexMismatch(
                f"source {self.name!r}, sample {sample} ({index.key_of(sample - first)!r}): its "
                f"document cannot be shown: {faults[0].detail}"
            )
        return parse_json(data, f"sample {sample}")

    def media(self, sample: int) -> list[Medium]:
        """Return the media files of a sample, in order.

        Raises:
            NotHere: there is no such sample, or it was redacted.
        """
        index, first = self._there(sample)
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
            NotHere: there is no such file.
        """
        for one in self.media(sample):
            if one.number == number:
                return one
        raise NotHere(f"source {self.name!r}, sample {sample}: it has no file {number}")

    def whole(self, sample: int, medium: Medium) -> bytes:
        """Return the bytes of a media file, checked against the CRC-32 of the index."""
        index, _ = self.around(sample)
        return read_checked(self.store, [medium_of(index, medium.line)])[0]

    def part(self, medium: Medium, offset: int, length: int) -> bytes:
        """Return some bytes of a media file unchecked, because a part has no checksum."""
        return self.store.get(medium.span.key, medium.span.offset + offset, length)


def _check_shown(where: str, manifest: dict[str, Any]) -> None:
    """Check the manifest fields that pages show but index readers do not check."""

    def text(value: Any) -> bool:
        return isinstance(value, str)

    def count(value: Any) -> bool:
        return type(value) is int and value >= 0

    def shard(value: Any) -> bool:
        return isinstance(value, dict) and all(
            right(value.get(key))
            for key, right in (("key", text), ("samples", count), ("size", count), ("sha256", text))
        )

    def shards(value: Any) -> bool:
        return isinstance(value, list) and all(map(shard, value))

    def tokenizer(value: Any) -> bool:
        return isinstance(value, dict) and text(value.get("name")) and text(value.get("sha256"))

    def redacted(value: Any) -> bool:
        samples = value.get("samples", []) if isinstance(value, dict) else None
        return isinstance(samples, list) and all(map(count, samples))

    for key, right in (
        ("category", text), ("content_hash", text), ("samples", count), ("items", count),
        ("tokenizer", tokenizer), ("shards", shards), ("redacted", redacted),
    ):  # fmt: skip
        if not right(manifest.get(key, {} if key == "redacted" else None)):
            raise IndexMismatch(
                f"{where}: {key} is {manifest.get(key)!r:.80}; not as it is written"
            )


class Corpus:
    """All sources under a root that the page shows.

    Args:
        store: store of the root.
        endpoint: endpoint that the store was opened with.
        names: names of the sources.
        limits: patch limits for token counts.
        folder: folder of facts.
        progress: called with a source's name; returns a context manager that yields a progress
            function.

    Raises:
        MissingKey, IndexMismatch, ValueError, OSError: as for `write_facts`.
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
        self.names = tuple(names)
        self._sources: dict[str, Fresh[ShownSource]] = {}

        def read(name: str) -> ShownSource:
            again = open_store(store.uri, endpoint=endpoint, patience=PATIENCE_S)
            return ShownSource(again, name, limits, folder)

        for name in names:
            with progress(name) as show:
                self._sources[name] = Fresh(
                    f"source {name!r}",
                    partial(manifests_of, store, (name,)),
                    partial(read, name),
                    partial(ShownSource, store, name, limits, folder, show),
                )
        self._facts: OrderedDict[Path, Facts] = OrderedDict()
        self._lock = threading.Lock()

    def source(self, name: str) -> ShownSource:
        """Return the current state of a source by its name.

        Raises:
            NotHere: there is no such source; suggests names. ComeAgain: it is being read again.
            MissingKey: it was removed. StoreError: the store cannot say whether it changed.
        """
        if name not in self._sources:
            raise NotHere(f"no source {name!r} here; {did_you_mean(name, self.names)}")
        return self._sources[name].now()

    def every(self) -> list[ShownSource]:
        """Return the current state of all sources, without removed ones.

        Raises:
            ComeAgain, StoreError: as for `source`.
        """
        return [one for one in in_threads(self._unless_removed, self.names, _THREADS) if one]

    def _unless_removed(self, name: str) -> ShownSource | None:
        try:
            return self._sources[name].now()
        except MissingKey:
            return None

    def facts(self, source: ShownSource) -> Facts:
        """Return the open facts of a source; the caller may use them for any length of time."""
        path = source.facts_file.path
        with self._lock:
            if path not in self._facts:
                self._facts[path] = Facts(source.facts_file, threads=2, memory=_MEMORY)
                if len(self._facts) > _OPEN:
                    self._facts.popitem(last=False)  # closes after its last user drops it
            self._facts.move_to_end(path)
            return self._facts[path]

    @property
    def categories(self) -> list[str]:
        """Sorted categories of the sources; the category of a source never changes."""
        return sorted({one.last.manifest["category"] for one in self._sources.values()})

    def chosen(self, source: str, category: str) -> list[ShownSource]:
        """Return the current state of the sources that a request selects.

        Args:
            source: name of one source; "" for all.
            category: category of the sources; "" for all.

        Raises:
            NotHere: there is no such source or category. Also as for `source`.
        """
        if category not in ("", *self.categories):
            raise NotHere(
                f"no source of category {category[:40]!r} here; "
                f"{did_you_mean(category[:40], self.categories)}"
            )
        found = [self.source(source)] if source else self.every()
        return [one for one in found if category in ("", one.manifest["category"])]
