"""An index that is larger than memory, a part of its samples at a time.

`manifest.read_index` holds all of a source, several hundred bytes a sample. Here the file is copied
to local disk and read in order; each part is a `SourceIndex` of its samples.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import expect, index_key, index_of, read_manifest
from data_pipeline.store.open import Store

PART_SAMPLES = 1 << 17
_COPY_BYTES = 16 << 20  # asked of the store at once


def index_parts(
    store: Store, name: str, scratch: Path, samples: int = PART_SAMPLES
) -> Iterator[SourceIndex]:
    """Yield the samples of a source in order, `samples` at a time.

    The file has the hash that the manifest gives; that its columns have the content hash is for
    `read_index` and `data verify` to say.

    Args:
        store: where it lies.
        name: of the source.
        scratch: file that holds a copy of the index, for the caller to remove.
        samples: of a part, at most.

    Raises:
        MissingKey, IndexMismatch, ValueError: as `read_index`.
    """
    where, manifest = f"{store.uri}/{name}", read_manifest(store, name)
    sha256 = _copy(store, index_key(name), scratch)
    expect(where, "index_sha256", sha256, manifest["index_sha256"])
    found = items = 0
    with pq.ParquetFile(scratch) as file:
        for batch in file.iter_batches(samples):
            part = index_of(pa.Table.from_batches([batch]), manifest, sha256)
            found, items = found + part.num_samples, items + part.num_items
            yield part
    expect(where, "samples", found, manifest["samples"])
    expect(where, "items", items, manifest["items"])


def _copy(store: Store, key: str, path: Path) -> str:
    """Copy an object into a file; returns its SHA-256 (hex)."""
    info, digest = store.head(key), hashlib.sha256()
    with path.open("wb") as file:
        for offset in range(0, info.size, _COPY_BYTES):
            length = min(_COPY_BYTES, info.size - offset)
            data = store.get(key, offset, length, etag=info.etag)
            digest.update(data)
            file.write(data)
    return digest.hexdigest()
