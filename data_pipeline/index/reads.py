"""Reads the bytes of samples and checks them against the CRC-32s of the index.

Bytes with a wrong checksum may have been damaged in transit and are read again, bypassing any
cache. If they stay wrong, `read_checked` raises an error, and `read_parts` lists them for callers
that can continue without them. All sample reads use this module except `data verify` and
`SampleStream`, which compare checksums themselves; the stream repeats its mismatched reads here.

A redaction replaces shards while running processes may still have the old index. No other sample
moves in the new shards (`index.redacted`), so a long-running reader can follow the replacements
(`moved`) and keep reading all other samples with the same checksums.
"""

import logging
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from isal.isal_zlib import crc32  # same values as zlib, several times as fast

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import IndexMismatch, expect, read_manifest
from data_pipeline.index.own_keys import folder_of
from data_pipeline.index.redacted import is_erased
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.objects import MAX_GAP
from data_pipeline.store.open import MissingKey, Span, Store, StoreUnavailable, get_many

log = logging.getLogger("data_pipeline.index.reads")

# Maximum reads of bytes with a wrong checksum, including the first.
READS = 3


class ShardReplaced(StoreUnavailable):
    """A redaction replaced a shard after its index was read; a restart reads the new index."""


class Located(Protocol):
    """A readable byte range with its CRC-32 and its name in messages."""

    @property
    def span(self) -> Span:
        """Byte range in the store."""
        ...

    @property
    def crc(self) -> int:
        """CRC-32 of the bytes, from the index."""
        ...

    @property
    def name(self) -> str:
        """Source, sample, file and shard, for messages."""
        ...


class Part(NamedTuple):
    """A sample's document or one of its media files; see `Located`."""

    span: Span
    crc: int
    name: str


def document_of(index: SourceIndex, sample: int) -> Part:
    """Return the part that holds the JSON document of a sample."""
    shard = index.shards[index.shard[sample]].key
    span = Span(shard, int(index.json_offset[sample]), int(index.json_length[sample]))
    name = f"source {index.name!r}, sample {index.key_of(sample)!r} in {shard!r}"
    return Part(span, int(index.json_crc[sample]), name)


def medium_of(index: SourceIndex, item: int) -> Part:
    """Return the media file of an item; chunks of one video give equal parts.

    `item` is a row of the index's item columns.
    """
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
    """The result of `read_parts`.

    Attributes:
        data: the bytes of each span.
        damaged: (span, CRC-32 of the index) of parts that stayed wrong -> description.
        reread: number of reads repeated because of a wrong checksum.
    """

    data: dict[Span, bytes]
    damaged: dict[tuple[Span, int], str]
    reread: int

    def damage(self, part: Located) -> str | None:
        """Return the damage of a part, with its name; None if it is intact."""
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
    """Read many parts with few requests; list the parts that stay damaged.

    Args:
        store: root that holds the shards.
        parts: in any order; repeated parts are read once.
        threads, max_gap: as for `get_many`.
        moved: replaced shard -> present shard, as known to the caller; new replacements are added.
            Redacted samples in them count as damaged. With None, a missing shard is an error.

    Raises:
        StoreError: the message names the key.
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
            if forget is not None:  # otherwise a cache would return the same bytes
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
    """Read spans, from the present shards if the named shards were replaced."""
    # A cache serves one batch better than single reads.
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
    """Return a map from replaced shards to the shards that replace them now.

    The manifest in a shard's folder names its replacement. If that source was collected but other
    sources share its shards, their manifests name it.
    """
    wanted = set(keys)
    folders = sorted({folder_of(key) for key in wanted})
    found = _follow(wanted, _replaced(store, folders))
    if found.keys() < wanted:
        others = sorted({*store.list_folders()} - {*folders})
        found |= _follow(wanted - found.keys(), _replaced(store, [*folders, *others]))
    return found


def _replaced(store: Store, names: Sequence[str]) -> dict[str, str]:
    """Return the replaced shards listed in manifests; skip missing or damaged manifests."""
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
        while now in replaced and now not in seen:  # a hostile manifest may contain a cycle
            seen.add(now)
            now = replaced[now]
        if now != key and now not in replaced:
            found[key] = now
    return found


def read_checked(
    store: Store, parts: Sequence[Located], threads: int = 8, max_gap: int = MAX_GAP
) -> list[bytes]:
    """Read many parts as `read_parts` does; return one `bytes` per part, in order.

    Raises:
        IndexMismatch: the bytes of a part stay wrong; the message names source, sample and shard.
        StoreError: the message names the key.
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
    """Read the JSON documents of some samples.

    Raises:
        IndexMismatch: as for `read_checked`.
    """
    parts = [document_of(index, sample) for sample in samples]
    where = f"{store.uri}/{index.name}: a sample's document"
    return [parse_json(text, where) for text in read_checked(store, parts, threads)]


def check_shards(
    store: Store, index: SourceIndex, every: int = 1, first: int = 0, threads: int = 8
) -> int:
    """Compare shards with the index: their size, and the CRC-32s of one sample in each.

    Args:
        every, first: check shards first, first + every, ...; ranks that share a source pass the
            number of ranks and their own rank to divide the work.

    Returns:
        The number of shards checked.

    Raises:
        MissingKey: a shard is missing. ShardReplaced: a redaction replaced it after the index was
            read. IndexMismatch: a value differs; the message names shard, value and expected value.
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
    """Turn a MissingKey into ShardReplaced if a redaction replaced the shard.

    Raises:
        ShardReplaced: a restart finds the new shard.
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
