"""Reads an index that is larger than memory, some samples at a time.

`manifest.read_index` holds the whole source in memory, at several hundred bytes per sample. This
module copies the file to local disk and reads it in order, twice: column by column for the content
hash, then part by part, each a `SourceIndex` of its samples.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.index.columns import (
    COLUMNS,
    GROUPS,
    HASHED,
    ShardInfo,
    SourceIndex,
    content_digest,
)
from data_pipeline.index.manifest import (
    check_columns,
    expect,
    index_key,
    index_of,
    numbers_of,
    read_manifest,
    refuse_nulls,
    refused_parquet,
)
from data_pipeline.store.open import Store

PART_SAMPLES = 1 << 17
_COPY_BYTES = 16 << 20  # per request to the store
_CHECKSUMS = ("json_crc", "item_crc")


def index_parts(
    store: Store, name: str, scratch: Path, samples: int = PART_SAMPLES
) -> Iterator[SourceIndex]:
    """Yield the samples of a source in order, `samples` at a time.

    Hashes are compared with the manifest before the first part, counts after the last.

    Args:
        store: root that holds the source.
        name: name of the source.
        scratch: path for a copy of the index file; the caller removes it.
        samples: maximum samples per part.

    Raises:
        MissingKey, IndexMismatch, ValueError: as for `read_index`.
    """
    where, manifest = f"{store.uri}/{name}", read_manifest(store, name)
    sha256 = _copy(store, index_key(name), scratch)
    expect(where, "index_sha256", sha256, manifest["index_sha256"])
    found = items = 0
    with refused_parquet(f"{where}/index.parquet"), pq.ParquetFile(scratch) as file:
        check_columns(file.schema_arrow.empty_table(), name)
        expect(where, "content_hash", content_hash(file, manifest), manifest["content_hash"])
        for part in _parts(file, manifest, sha256, samples):
            found, items = found + part.num_samples, items + part.num_items
            yield part
    expect(where, "samples", found, manifest["samples"])
    expect(where, "items", items, manifest["items"])


def _parts(
    file: pq.ParquetFile, manifest: Mapping[str, Any], sha256: str, samples: int
) -> Iterator[SourceIndex]:
    first = 0
    for batch in file.iter_batches(samples):
        yield part_of(pa.Table.from_batches([batch]), manifest, sha256, first)
        first += batch.num_rows


def part_of(rows: pa.Table, manifest: Mapping[str, Any], sha256: str, first: int) -> SourceIndex:
    """Return the index of some samples of a source.

    Args:
        rows: consecutive rows of index.parquet.
        manifest, sha256: as for `index_of`.
        first: number of the first row's sample in the source.
    """
    if (redacted := manifest.get("redacted")) is not None:
        inside = range(first, first + rows.num_rows)
        mine = [sample - first for sample in redacted["samples"] if sample in inside]
        manifest = {**manifest, "redacted": {**redacted, "samples": mine}}
    return index_of(rows, manifest, sha256)


def content_hash(file: pq.ParquetFile, manifest: Mapping[str, Any]) -> str:
    """Return `SourceIndex.content_hash` of all rows; only part of a column is in memory.

    Args:
        file: index.parquet.
        manifest: manifest of the source.
    """
    shards = [ShardInfo(**shard) for shard in manifest["shards"]]
    digest = content_digest(manifest["category"], manifest["tokenizer"]["sha256"], shards)

    def parts(name: str) -> Iterator[pa.Array]:
        if name in _CHECKSUMS and "redacted" in manifest:  # the file has the original checksums
            for part in _parts(file, manifest, "", PART_SAMPLES):
                yield pa.array(getattr(part, name))
            return
        for batch in file.iter_batches(PART_SAMPLES, columns=[name]):
            refuse_nulls(batch.column(0), f"source {manifest['name']!r}: column {name}")
            yield batch.column(0)

    first = {f"{group}_ptr": next(iter(columns)) for group, columns in GROUPS.items()}
    for name in HASHED:
        digest.update(f"{name}\n".encode())
        if name in first:
            end = np.zeros(1, np.int64)
            digest.update(end.tobytes())
            for column in parts(first[name]):
                lengths = numbers_of(column.value_lengths())
                pointer = end[-1] + np.cumsum(lengths, dtype=np.int64)
                digest.update(pointer.tobytes())
                end = pointer[-1:] if pointer.size else end
            continue
        for column in parts(name):
            values = column.flatten() if pa.types.is_nested(column.type) else column
            digest.update(numbers_of(values).astype(COLUMNS[name]).tobytes())
    between = ""
    for column in parts("key"):
        digest.update((between + "\n".join(column.to_pylist())).encode())
        between = "\n"
    return digest.hexdigest()


def _copy(store: Store, key: str, path: Path) -> str:
    """Copy an object to a file; return its SHA-256 (hex)."""
    info, digest = store.head(key), hashlib.sha256()
    with path.open("wb") as file:
        for offset in range(0, info.size, _COPY_BYTES):
            length = min(_COPY_BYTES, info.size - offset)
            data = store.get(key, offset, length, etag=info.etag)
            digest.update(data)
            file.write(data)
    return digest.hexdigest()
