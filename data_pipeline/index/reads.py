"""The one door to the bytes of samples: what comes through it has the CRC-32 of the index.

Bytes with another checksum are read again, past any cache: they may have changed on the way. What
stays wrong is raised by `read_checked`, and listed by `read_parts` for who can go on without it.
Only `data verify` and `SampleStream` read in their own ways and compare for themselves; the stream
reads what differs again through here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from isal.isal_zlib import crc32  # zlib's numbers in a fraction of its time

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import IndexMismatch, expect
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.objects import MAX_GAP
from data_pipeline.store.open import Span, Store, get_many

# Reads of bytes with a wrong checksum, the first included.
READS = 3


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
    store: Store, parts: Sequence[Located], threads: int = 8, max_gap: int = MAX_GAP
) -> Reading:
    """Read many parts with few requests, each once; those that stay damaged are listed.

    Args:
        store: where the shards lie.
        parts: in any order, also several times the same.
        threads, max_gap: as of `get_many`.

    Raises:
        StoreError: naming the key.
    """
    spans = list(dict.fromkeys(part.span for part in parts))
    # A cache answers many reads at once better than one by one.
    together = getattr(store, "get_many", None)
    if together is None:
        bodies = get_many(store, spans, max_gap, threads)
    else:
        bodies = together(spans, max_gap, threads)
    data = dict(zip(spans, bodies, strict=True))
    damaged: dict[tuple[Span, int], str] = {}
    again = 0
    for span, crc in dict.fromkeys((part.span, part.crc) for part in parts):
        for read in range(1, READS + 1):
            if (found := crc32(data[span])) == crc:
                break
            if read == READS:
                damaged[span, crc] = (
                    f"CRC-32 is {found:08x}, expected {crc:08x} (read {READS} times)"
                )
                break
            forget = getattr(store, "forget", None)
            if forget is not None:  # or a cache would answer with the same bytes
                forget(*span)
            data[span] = store.get(*span)
            again += 1
    return Reading(data, damaged, again)


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
        MissingKey: a shard is gone.
        IndexMismatch: naming the shard, the value and the expected one.
    """
    chosen = list(range(first, len(index.shards), every))
    parts: list[Part] = []
    for number in chosen:
        info = index.shards[number]
        expect(f"{store.uri}/{info.key}", "size", store.head(info.key).size, info.size)
        first, end = np.searchsorted(index.shard, [number, number + 1])
        if first == end:
            continue
        sample = int(first + end) // 2
        parts.append(document_of(index, sample))
        items = range(index.item_ptr[sample], index.item_ptr[sample + 1])
        parts += [medium_of(index, item) for item in items]
    read_checked(store, parts, threads)
    return len(chosen)
