"""The one door to the bytes of samples: what comes through it has the CRC-32 of the index.

Bytes with another checksum are read again, past any cache: they may have changed on the way. What
stays wrong is raised by `read_checked`, and listed by `read_parts` for who can go on without it.
Only `data verify` and `SampleStream` read in their own ways and compare for themselves; the stream
reads what differs again through here.

A redaction replaces shards by others in which no other sample moves (`index.redacted`), also under
a process that still has the former index. Who reads for long follows such shards to the present
ones (`moved`): all samples but the redacted ones are read on, with the same checksums.
"""

import logging
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from isal.isal_zlib import crc32  # zlib's numbers in a fraction of its time

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import IndexMismatch, expect, read_manifest
from data_pipeline.index.own_keys import folder_of
from data_pipeline.index.redacted import is_erased
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.objects import MAX_GAP
from data_pipeline.store.open import MissingKey, Span, Store, StoreUnavailable, get_many

log = logging.getLogger("data_pipeline.index.reads")

# Reads of bytes with a wrong checksum, the first included.
READS = 3


class ShardReplaced(StoreUnavailable):
    """A redaction has replaced a shard since its index was read; a new start reads the new one."""


class Located(Protocol):
    """What can be read: where it lies, its CRC-32, and what a message calls it."""

    @property
    def span(self) -> Span:
        """Where it lies."""
        ...

    @property
    def crc(self) -> int:
        """CRC-32 of its bytes, by the index."""
        ...

    @property
    def name(self) -> str:
        """Source, sample, file and shard."""
        ...


class Part(NamedTuple):
    """A sample's document or one of its media files; see `Located`."""

    span: Span
    crc: int
    name: str


def document_of(index: SourceIndex, sample: int) -> Part:
    """The JSON document of a sample."""
    shard = index.shards[index.shard[sample]].key
    span = Span(shard, int(index.json_offset[sample]), int(index.json_length[sample]))
    name = f"source {index.name!r}, sample {index.key_of(sample)!r} in {shard!r}"
    return Part(span, int(index.json_crc[sample]), name)


def medium_of(index: SourceIndex, item: int) -> Part:
    """The media file of an item (line of the index); chunks of one video give equal parts."""
    sample = int(np.searchsorted(index.item_ptr, item, side="right")) - 1
    shard = index.shards[index.shard[sample]].key
    span = Span(shard, int(index.item_offset[item]), int(index.item_length[item]))
    name = (
        f"source {index.name!r}, sample {index.key_of(sample)!r}, file {index.item_media[item]} "
        f"in {shard!r}"
    )
    return Part(span, int(index.item_crc[item]), name)


@dataclass(frozen=True)
class Reading:
    """What was read.

    Attributes:
        data: the bytes of each span.
        damaged: (span, CRC-32 of the index) of what stayed wrong, and how.
        reread: reads that were repeated for a wrong checksum.
    """

    data: dict[Span, bytes]
    damaged: dict[tuple[Span, int], str]
    reread: int

    def damage(self, part: Located) -> str | None:
        """What is wrong with a part, by its name; None if nothing is."""
        wrong = self.damaged.get((part.span, part.crc))
        return wrong and f"{part.name}: {wrong}"


def read_parts(
    store: Store,
    parts: Sequence[Located],
    threads: int = 8,
    max_gap: int = MAX_GAP,
    *,
    moved: MutableMapping[str, str] | None = None,
) -> Reading:
    """Read many parts with few requests, each once; those that stay damaged are listed.

    Args:
        store: where the shards lie.
        parts: in any order, also several times the same.
        threads, max_gap: as of `get_many`.
        moved: replaced shards that the caller has met, with those in their places; more are added.
            What was redacted in them counts as damaged. None: a shard that is gone is an error.

    Raises:
        StoreError: naming the key.
    """
    spans = list(dict.fromkeys(part.span for part in parts))
    bodies = _bodies(store, spans, threads, max_gap, moved)
    data = dict(zip(spans, bodies, strict=True))
    damaged: dict[tuple[Span, int], str] = {}
    again = 0
    for span, crc in dict.fromkeys((part.span, part.crc) for part in parts):
        for read in range(1, READS + 1):
            if (found := crc32(data[span])) == crc:
                break
            if moved and span.key in moved and is_erased(data[span]):
                damaged[span, crc] = "was redacted after this start had read the index"
                break
            if read == READS:
                damaged[span, crc] = (
                    f"CRC-32 is {found:08x}, expected {crc:08x} (read {READS} times)"
                )
                break
            forget = getattr(store, "forget", None)
            now = _now(span, moved)
            if forget is not None:  # or a cache would answer with the same bytes
                forget(*now)
            data[span] = store.get(*now)
            again += 1
    return Reading(data, damaged, again)


def _now(span: Span, moved: MutableMapping[str, str] | None) -> Span:
    return span._replace(key=moved.get(span.key, span.key)) if moved else span


def _bodies(
    store: Store,
    spans: Sequence[Span],
    threads: int,
    max_gap: int,
    moved: MutableMapping[str, str] | None,
) -> list[bytes]:
    """Read spans, from the present shards where those that were named have been replaced."""
    # A cache answers many reads at once better than one by one.
    together = getattr(store, "get_many", None) or partial(get_many, store)
    while True:
        try:
            return together([_now(span, moved) for span in spans], max_gap, threads)
        except MissingKey:
            if moved is None:
                raise
            found = moved_shards(store, {span.key for span in spans})
            new = {key: now for key, now in found.items() if moved.get(key) != now}
            if not new:
                raise
            for key, now in sorted(new.items()):
                log.warning("%s/%s was replaced by a redaction: %s is read", store.uri, key, now)
            moved.update(new)


def moved_shards(store: Store, keys: Iterable[str]) -> dict[str, str]:
    """Map the shards that redactions have replaced to the shards that replace them now.

    The manifest in a shard's folder names its replacement. If that source was collected and others
    share its shards, their manifests name it.
    """
    wanted = set(keys)
    folders = sorted({folder_of(key) for key in wanted})
    found = _follow(wanted, _replaced(store, folders))
    if found.keys() < wanted:
        others = sorted({*store.list_folders()} - {*folders})
        found |= _follow(wanted - found.keys(), _replaced(store, [*folders, *others]))
    return found


def _replaced(store: Store, names: Sequence[str]) -> dict[str, str]:
    """Return what the manifests of sources say of replaced shards; of one that is torn, nothing."""
    found: dict[str, str] = {}
    for name in names:
        with suppress(MissingKey, IndexMismatch, KeyError, TypeError):
            lines = read_manifest(store, name).get("redacted", {}).get("replaced", ())
            found |= {str(one["key"]): str(one["by"]) for one in lines}
    return found


def _follow(keys: Iterable[str], replaced: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in keys:
        now, seen = key, set[str]()
        while now in replaced and now not in seen:  # a hostile manifest may go in circles
            seen.add(now)
            now = replaced[now]
        if now != key and now not in replaced:
            found[key] = now
    return found


def read_checked(
    store: Store, parts: Sequence[Located], threads: int = 8, max_gap: int = MAX_GAP
) -> list[bytes]:
    """Read many parts, as `read_parts` does; one `bytes` per part, in their order.

    Raises:
        IndexMismatch: the bytes of a part stay wrong; names source, sample and shard.
        StoreError: naming the key.
    """
    reading = read_parts(store, parts, threads, max_gap)
    for part in parts:
        if wrong := reading.damage(part):
            raise IndexMismatch(
                f"{store.uri}: {wrong}; index and data do not belong together: restore the objects "
                "or ingest the source again"
            )
    return [reading.data[part.span] for part in parts]


def read_samples(
    store: Store, index: SourceIndex, samples: Sequence[int], threads: int = 8
) -> list[dict[str, Any]]:
    """The JSON documents of some samples.

    Raises:
        IndexMismatch: as `read_checked`.
    """
    parts = [document_of(index, sample) for sample in samples]
    where = f"{store.uri}/{index.name}: a sample's document"
    return [parse_json(text, where) for text in read_checked(store, parts, threads)]


def check_shards(
    store: Store, index: SourceIndex, every: int = 1, first: int = 0, threads: int = 8
) -> int:
    """Compare shards with the index: their size, and one whole sample's CRCs.

    Args:
        every, first: check shards first, first + every, ...; ranks that share a source pass their
            number and rank and divide the work.

    Returns:
        The number of shards checked.

    Raises:
        MissingKey: a shard is gone. ShardReplaced: by a redaction, since the index was read.
        IndexMismatch: naming the shard, the value and the expected one.
    """
    chosen = list(range(first, len(index.shards), every))
    parts: list[Part] = []
    for number in chosen:
        info = index.shards[number]
        with replaced_shards_named(store, index, [info.key]):
            size = store.head(info.key).size
        expect(f"{store.uri}/{info.key}", "size", size, info.size)
        first, end = np.searchsorted(index.shard, [number, number + 1])
        if first == end:
            continue
        sample = int(first + end) // 2
        parts.append(document_of(index, sample))
        items = range(index.item_ptr[sample], index.item_ptr[sample + 1])
        parts += [medium_of(index, item) for item in items]
    with replaced_shards_named(store, index, [part.span.key for part in parts]):
        read_checked(store, parts, threads)
    return len(chosen)


@contextmanager
def replaced_shards_named(store: Store, index: SourceIndex, keys: Iterable[str]) -> Iterator[None]:
    """Have a shard that is gone tell so where a redaction replaced it: a new start finds another.

    Raises:
        ShardReplaced: in place of a MissingKey.
    """
    try:
        yield
    except MissingKey as error:
        moved = moved_shards(store, keys)
        if not moved:
            raise
        key, now = min(moved.items())
        raise ShardReplaced(
            f"{store.uri}/{key} of source {index.name!r} was replaced by {now}: samples in it were "
            "redacted after this start had read the index; start again (--resume latest), which "
            "reads what is there now"
        ) from error
