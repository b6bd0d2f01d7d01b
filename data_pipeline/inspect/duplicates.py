"""Finds media files and samples that occur more than once in the sources, byte for byte.

Length and CRC-32 are in the index, so only files that agree in both are read, and their SHA-256
decides. A sample is a duplicate if its document and all of its media are; keys are ignored.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.reads import Part, document_of, medium_of, read_checked
from data_pipeline.keyed import mix
from data_pipeline.plan.csr import row_sums
from data_pipeline.store.open import Store

_BATCH_BYTES = 32 << 20
_WORD = 32


class Place(NamedTuple):
    """Location of a copy; `media` is the file's number in its sample, -1 for whole samples."""

    source: str
    sample: str
    media: int = -1


@dataclass(frozen=True)
class Group:
    """Equal media files or samples: their SHA-256 (hex), the bytes of one copy, all locations."""

    sha256: str
    bytes: int
    places: tuple[Place, ...]

    @property
    def redundant_bytes(self) -> int:
        """Bytes of all copies after the first."""
        return self.bytes * (len(self.places) - 1)


@dataclass(frozen=True)
class Duplicates:
    """Groups of two or more copies, sorted by redundant bytes, largest first.

    Attributes:
        media: equal files. samples: equal samples.
        left_out: sources that were skipped because other sources have all of their shards.
    """

    media: tuple[Group, ...]
    samples: tuple[Group, ...]
    left_out: tuple[str, ...] = ()

    def as_dict(self, listed: int = 50) -> dict[str, Any]:
        """Return the groups as JSON data, with at most `listed` groups and places per group.

        Per kind: the number of groups, the copies after the first and their bytes, and the largest
        groups. The skipped sources are in `left_out`.
        """
        kinds = {
            kind: {
                "groups": len(groups),
                "redundant": sum(len(group.places) - 1 for group in groups),
                "redundant_bytes": sum(group.redundant_bytes for group in groups),
                "largest": [
                    {
                        "sha256": group.sha256,
                        "bytes": group.bytes,
                        "copies": len(group.places),
                        "places": [place._asdict() for place in group.places[:listed]],
                    }
                    for group in groups[:listed]
                ],
            }
            for kind, groups in (("media", self.media), ("samples", self.samples))
        }
        return kinds | {"left_out": list(self.left_out)}


class _Candidate(NamedTuple):
    """A media file or sample that may have a duplicate: number of its source, and its row there."""

    source: int
    line: int


def find_duplicates(
    store: Store,
    indices: Sequence[SourceIndex],
    threads: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Duplicates:
    """Find equal media files and equal samples, within and across sources.

    `progress` is called with (bytes read, bytes to read).

    Raises:
        StoreError: a shard cannot be read.
        IndexMismatch: a shard does not match the index.
    """
    indices, left_out = _with_own_shards(indices)
    files = [np.flatnonzero(index.item_chunk == 0) for index in indices]
    media = _candidates([
        file_fingerprint(index.item_length[lines], index.item_crc[lines])
        for index, lines in zip(indices, files, strict=True)
    ])  # fmt: skip
    media = [_Candidate(source, int(files[source][line])) for source, line in media]
    samples = _candidates([sample_fingerprint(index) for index in indices])
    parts = [medium_of(indices[source], line) for source, line in media]
    parts += [document_of(indices[source], line) for source, line in samples]
    total = sum(part.span.length for part in parts)
    hashes = _hashes(store, parts, threads, lambda done: progress(done, total))
    of_media = dict(zip(media, hashes[: len(media)], strict=True))
    of_samples = {
        candidate: _sample_hash(indices[candidate.source], candidate, document, of_media)
        for candidate, document in zip(samples, hashes[len(media) :], strict=True)
    }
    return Duplicates(
        _groups(indices, of_media, _media_place, lambda i, line: int(i.item_length[line])),
        _groups(indices, of_samples, _sample_place, _sample_bytes),
        left_out,
    )


def _with_own_shards(
    indices: Sequence[SourceIndex],
) -> tuple[list[SourceIndex], tuple[str, ...]]:
    """Skip sources that only reindex shards of earlier sources; their bytes are not copies."""
    kept: list[SourceIndex] = []
    seen: set[str] = set()
    for index in indices:
        keys = {shard.key for shard in index.shards}
        if not keys <= seen:
            kept.append(index)
        seen |= keys
    return kept, tuple(index.name for index in indices if index not in kept)


def file_fingerprint(length: NDArray[np.int64], crc: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Return uint64 [n], equal for files that agree in length and CRC-32."""
    return (length.astype(np.uint64) << np.uint64(_WORD)) ^ crc.astype(np.uint64)


def sample_fingerprint(index: SourceIndex) -> NDArray[np.uint64]:
    """Return uint64 [N], equal for samples whose document and media agree in length and CRC-32.

    The order of the media is ignored.
    """
    media = mix(file_fingerprint(index.item_length, index.item_crc)).astype(np.int64)
    with np.errstate(over="ignore"):
        own = row_sums(media, index.item_ptr).astype(np.uint64)
    return file_fingerprint(index.json_length, index.json_crc) ^ mix(own)


def _candidates(keys: Sequence[NDArray[np.uint64]]) -> list[_Candidate]:
    """Return the rows whose key occurs more than once, in order."""
    together = np.concatenate([np.zeros(0, np.uint64), *keys])
    _, inverse, counts = np.unique(together, return_inverse=True, return_counts=True)
    source = np.repeat(np.arange(len(keys)), [len(key) for key in keys])
    first = np.cumsum([0, *(len(key) for key in keys)])
    chosen = np.flatnonzero(counts[inverse] > 1)
    return [_Candidate(int(source[i]), int(i - first[source[i]])) for i in chosen]


def _hashes(
    store: Store, parts: Sequence[Part], threads: int, progress: Callable[[int], None]
) -> list[str]:
    """Return the SHA-256 (hex) of parts; neighbours are read together, batch by batch."""
    found = [""] * len(parts)
    batch: list[int] = []
    done = size = 0
    order = sorted(range(len(parts)), key=lambda i: parts[i].span)
    for place, number in enumerate(order):
        batch.append(number)
        size += parts[number].span.length
        if size >= _BATCH_BYTES or place == len(order) - 1:
            bodies = read_checked(store, [parts[i] for i in batch], threads)
            for i, data in zip(batch, bodies, strict=True):
                found[i] = hashlib.sha256(data).hexdigest()
            done += size
            progress(done)
            batch, size = [], 0
    return found


def _sample_hash(
    index: SourceIndex, sample: _Candidate, document: str, of_media: dict[_Candidate, str]
) -> str:
    """Return the SHA-256 over the hashes of the document and the media files, in order.

    A file without a hash has no duplicate, so the sample has none; its number makes the hash
    unique.
    """
    digest = hashlib.sha256(document.encode())
    for item in range(int(index.item_ptr[sample.line]), int(index.item_ptr[sample.line + 1])):
        if index.item_chunk[item] == 0:
            known = of_media.get(_Candidate(sample.source, item))
            digest.update((known or f"only {sample}").encode())
    return digest.hexdigest()


def _media_place(index: SourceIndex, line: int) -> Place:
    sample = int(np.searchsorted(index.item_ptr, line, side="right")) - 1
    return Place(index.name, index.key_of(sample), int(index.item_media[line]))


def _sample_place(index: SourceIndex, line: int) -> Place:
    return Place(index.name, index.key_of(line))


def _sample_bytes(index: SourceIndex, line: int) -> int:
    part = slice(int(index.item_ptr[line]), int(index.item_ptr[line + 1]))
    media = index.item_length[part][index.item_chunk[part] == 0]
    return int(index.json_length[line] + media.sum())


def _groups(
    indices: Sequence[SourceIndex],
    hashes: dict[_Candidate, str],
    place: Callable[[SourceIndex, int], Place],
    size: Callable[[SourceIndex, int], int],
) -> tuple[Group, ...]:
    by_hash: dict[str, list[_Candidate]] = {}
    for candidate, sha256 in hashes.items():
        by_hash.setdefault(sha256, []).append(candidate)
    groups = [
        Group(
            sha256,
            size(indices[members[0].source], members[0].line),
            tuple(place(indices[member.source], member.line) for member in members),
        )
        for sha256, members in by_hash.items()
        if len(members) > 1
    ]
    return tuple(sorted(groups, key=lambda group: (-group.redundant_bytes, group.sha256)))
