"""Hashes of the samples erased under a root, kept even after the source itself is collected.

For each redacted sample, `NAME/erased.json` holds the CRC-32 of its document (to find candidates
quickly) and a SHA-256 over key, lengths and checksums of document and media. Neither hash reveals
the sample. A sync copies no shard with an erased sample, and no ingest writes an erased sample; a
different sample under the same key is allowed.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import (
    expect,
    index_key,
    index_of,
    read_manifest,
    read_table,
)
from data_pipeline.store.json_objects import MOST_BYTES, read_json
from data_pipeline.store.objects import in_threads
from data_pipeline.store.open import FolderStore, MissingBucket, MissingKey, Store

_THREADS = 16


@dataclass(frozen=True)
class Erased:
    """Erased samples.

    Attributes:
        by_crc: CRC-32 of the document -> SHA-256 hashes of samples (`digest`).
    """

    by_crc: dict[int, set[str]] = field(default_factory=dict)

    def add(self, crc: int, sha256: str) -> None:
        """Add one sample."""
        self.by_crc.setdefault(crc, set()).add(sha256)

    def has(self, key: str, sums: Sequence[tuple[int, int]]) -> bool:
        """Return whether a sample is erased; see `digest` for the arguments."""
        found = self.by_crc.get(sums[0][1])
        return found is not None and digest(key, sums) in found

    def among(self, index: SourceIndex) -> list[int]:
        """Return the erased samples of a source that are not redacted there, ascending."""
        near = np.flatnonzero(np.isin(index.json_crc, list(self.by_crc)))
        candidates = sorted({*near.tolist()} - {*index.redacted})
        return [one for one in candidates if self.has(index.key_of(one), sums_of(index, one))]


def digest(key: str, sums: Sequence[tuple[int, int]]) -> str:
    """Return the SHA-256 that identifies a sample.

    Args:
        key: key of the sample.
        sums: (length, CRC-32) of its document, then of each item's file (`sums_of`).
    """
    return hashlib.sha256(json.dumps([key, *sums]).encode()).hexdigest()


def sums_of(index: SourceIndex, sample: int) -> list[tuple[int, int]]:
    """Return (length, CRC-32) of a sample's document, then of each item's file."""
    first, end = index.item_ptr[sample : sample + 2].tolist()
    items = zip(index.item_length[first:end].tolist(), index.item_crc[first:end].tolist())
    return [(int(index.json_length[sample]), int(index.json_crc[sample])), *items]


def erased_key(name: str) -> str:
    """Return the key of the list of a source's erased samples."""
    return f"{name}/erased.json"


def read_erased(store: Store) -> Erased:
    """Return the samples erased under a root, from present and collected sources.

    Raises:
        ValueError: a file is malformed, so the samples that must not return are unknown.
    """
    try:
        folders = store.list_folders()
    except MissingBucket:
        if isinstance(store, FolderStore):
            return Erased()  # the first write creates the folder
        raise
    found = Erased()
    for one in in_threads(lambda name: _read(store, name), folders, _THREADS):
        for crc, sha256 in one:
            found.add(crc, sha256)
    return found


def note_erased(store: Store, name: str, index: SourceIndex, samples: Sequence[int]) -> None:
    """Add samples of a source to its list of erased samples.

    Args:
        name: folder of the source; its manifest may give another name.
        index: index with the checksums from before the redaction.
    """
    known = _read(store, name)
    sums = [sums_of(index, sample) for sample in samples]
    told = {
        (one[0][1], digest(index.key_of(sample), one)) for sample, one in zip(samples, sums)
    } | {*known}
    if told != {*known}:
        text = json.dumps({"erased": sorted(told)}, indent=1) + "\n"
        if len(text) > MOST_BYTES:
            raise ValueError(
                f"{store.uri}/{erased_key(name)}: {len(told):,} redacted samples take "
                f"{len(text):,} bytes, at most {MOST_BYTES:,} are read"
            )
        store.put(erased_key(name), text.encode())


def note_all_erased(store: Store, name: str) -> None:
    """Add all redacted samples of a source to its list; a source copied by a sync has none yet.

    Raises:
        ValueError, IndexMismatch, StoreError: the source or its list cannot be read.
    """
    manifest = read_manifest(store, name)
    if samples := manifest.pop("redacted", {}).get("samples"):
        data = store.get(index_key(name))
        sha256 = hashlib.sha256(data).hexdigest()
        expect(f"{store.uri}/{name}", "index_sha256", sha256, manifest["index_sha256"])
        # "redacted" was popped from the manifest, so the index keeps the original checksums.
        index = index_of(read_table(data, f"{store.uri}/{index_key(name)}"), manifest, sha256)
        note_erased(store, name, index, samples)


def _read(store: Store, name: str) -> list[tuple[int, str]]:
    given: Any = {"erased": []}
    try:
        with suppress(MissingKey):
            given = read_json(store, erased_key(name))
        return [(int(crc), str(sha256)) for crc, sha256 in given["erased"]]
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{store.uri}/{erased_key(name)}: expected {{erased: [[crc32, sha256]]}}; as long as "
            "nobody knows what was erased here, nothing is copied or written here: restore it"
        ) from None
