"""The sources that a page shows: their manifests, facts, and indices in small pieces.

A source is read again when its manifest is another (`fresh`): nothing of a sample that was redacted
is shown afterwards.
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
PATIENCE_S = 10.0  # without progress: who looks at a page waits no longer for its store
_MEMORY = "96MB"  # of DuckDB, for each of the sources whose facts are open
_OPEN = 6
_THREADS = 16


class NotHere(ValueError):
    """There is no such source, sample or file."""


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
        store: where it lies; it has read the manifest of this moment.
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
        self.name, self.store = name, store
        _check_shown(f"{store.uri}/{manifest_key(name)}", read_manifest(store, name))
        self.facts_file: FactsFile = write_facts(store, name, limits, folder, progress)[0]
        self.cut = CutIndex(store, name, folder)
        self.rejected = RejectedList(store, name)
        self._redacted = frozenset(self.manifest.get("redacted", {}).get("samples", ()))

    @property
    def manifest(self) -> dict[str, Any]:
        """Return the manifest."""
        return self.cut.manifest

    @property
    def identity(self) -> str:
        """What runs know it by, whatever was redacted since: as `SourceIndex.identity`."""
        return identity_of(self.manifest)

    @property
    def num_redacted(self) -> int:
        """Samples that were redacted."""
        return len(self._redacted)

    def provenance(self) -> dict[str, Any] | None:
        """Return what it was made of."""
        return read_provenance(self.store, self.name)

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

    def _there(self, sample: int) -> tuple[SourceIndex, int]:
        """As `around`, of a sample whose bytes are there."""
        index, first = self.around(sample)
        if sample in self._redacted:
            key = index.key_of(sample - first)
            raise NotHere(f"source {self.name!r}, sample {sample} ({key!r}): it was redacted")
        return index, first

    def document(self, sample: int) -> dict[str, Any]:
        """Return a sample's document.

        Raises:
            NotHere: there is none, or it was redacted. IndexMismatch: it is not what the index
                says, or not in the format. StoreError: it cannot be read.
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
            NotHere: there is none.
        """
        for one in self.media(sample):
            if one.number == number:
                return one
        raise NotHere(f"source {self.name!r}, sample {sample}: it has no file {number}")

    def whole(self, sample: int, medium: Medium) -> bytes:
        """Return the bytes of a media file, which have the CRC-32 of the index."""
        index, _ = self.around(sample)
        return read_checked(self.store, [medium_of(index, medium.line)])[0]

    def part(self, medium: Medium, offset: int, length: int) -> bytes:
        """Return some bytes of a media file, as they lie there: a part has no checksum."""
        return self.store.get(medium.span.key, medium.span.offset + offset, length)


def _check_shown(where: str, manifest: dict[str, Any]) -> None:
    """Check what pages show of a manifest, and no reader of the index has checked."""

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
        """Return a source by its name, as it is now.

        Raises:
            NotHere: there is none; says which there are. ComeAgain: it is being read again.
            MissingKey: it was removed. StoreError: nobody knows whether it is as it was.
        """
        if name not in self._sources:
            raise NotHere(f"no source {name!r} here; {did_you_mean(name, self.names)}")
        return self._sources[name].now()

    def every(self) -> list[ShownSource]:
        """Return all sources as they are now, but for those that were removed.

        Raises:
            ComeAgain, StoreError: as `source`.
        """
        return [one for one in in_threads(self._unless_removed, self.names, _THREADS) if one]

    def _unless_removed(self, name: str) -> ShownSource | None:
        try:
            return self._sources[name].now()
        except MissingKey:
            return None

    def facts(self, source: ShownSource) -> Facts:
        """Return the facts of a source, open; who has them may use them for as long as wanted."""
        path = source.facts_file.path
        with self._lock:
            if path not in self._facts:
                self._facts[path] = Facts(source.facts_file, threads=2, memory=_MEMORY)
                if len(self._facts) > _OPEN:
                    self._facts.popitem(last=False)  # closed once nobody asks it any more
            self._facts.move_to_end(path)
            return self._facts[path]

    @property
    def categories(self) -> list[str]:
        """The categories that there are, sorted; a source keeps its own."""
        return sorted({one.last.manifest["category"] for one in self._sources.values()})

    def chosen(self, source: str, category: str) -> list[ShownSource]:
        """Return the sources that a page is about, as they are now.

        Args:
            source: one by its name; "" for all.
            category: theirs; "" for all.

        Raises:
            NotHere: there is no such source, or none of the category. Also as `source`.
        """
        if category not in ("", *self.categories):
            raise NotHere(
                f"no source of category {category[:40]!r} here; "
                f"{did_you_mean(category[:40], self.categories)}"
            )
        found = [self.source(source)] if source else self.every()
        return [one for one in found if category in ("", one.manifest["category"])]
