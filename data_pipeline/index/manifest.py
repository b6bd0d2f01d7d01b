"""The files of a source's index, and reading by it.

One Parquet file with a row per sample (what a sample has many of are list columns) and one small
JSON manifest that names its hash, the shards' hashes and the tokenizer. The manifest is written
last and is what makes a source exist. Reading checks the manifest's schema, the index against the
manifest, and every byte range against its CRC-32 from the index.
"""

import hashlib
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_pipeline.index.columns import (
    COLUMNS,
    GROUPS,
    SAMPLE_COLUMNS,
    SCHEMA,
    ShardInfo,
    SourceIndex,
)
from data_pipeline.store.open import MissingKey, Span, Store, get_many


class IndexMismatch(Exception):
    """Index, manifest and shards do not belong together, or bytes were damaged at rest."""


def manifest_key(name: str) -> str:
    """Where a source's manifest lies."""
    return f"{name}/manifest.json"


def index_key(name: str) -> str:
    """Where a source's index lies."""
    return f"{name}/index.parquet"


def write_index(store: Store, index: SourceIndex) -> None:
    """Put index.parquet, then manifest.json; with the latter the source exists."""
    data = _to_parquet(index)
    manifest = {
        "schema": SCHEMA,
        "name": index.name,
        "category": index.category,
        "tokenizer": {"name": index.tokenizer_name, "sha256": index.tokenizer_hash},
        "samples": index.num_samples,
        "items": index.num_items,
        "shards": [asdict(shard) for shard in index.shards],
        "index_sha256": hashlib.sha256(data).hexdigest(),
        "content_hash": index.content_hash,
    }
    store.put(index_key(index.name), data)
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    store.put(manifest_key(index.name), text.encode())


def read_index(store: Store, name: str) -> SourceIndex:
    """Read and check a source.

    Raises:
        MissingKey: there is no manifest: no such source, or its ingest did not finish.
        IndexMismatch: another schema, or an index that is not the manifest's.
    """
    where = f"{store.uri}/{name}"
    try:
        manifest = json.loads(store.get(manifest_key(name)))
    except MissingKey as error:
        raise MissingKey(
            f"{where}: no manifest.json, so no finished source of this name; check the name or "
            "run the ingest (again)"
        ) from error
    except ValueError as error:
        raise IndexMismatch(f"{where}/manifest.json: not JSON; ingest the source again") from error
    found = manifest.get("schema") if isinstance(manifest, dict) else None
    if found != SCHEMA:
        raise IndexMismatch(
            f"{where}/manifest.json: schema is {found!r}, this version reads {SCHEMA!r}; ingest "
            "the source again or use the version that wrote it"
        )
    data = store.get(index_key(name))
    _expect(where, "index_sha256", hashlib.sha256(data).hexdigest(), manifest["index_sha256"])
    index = _from_parquet(data, manifest)
    _expect(where, "samples", index.num_samples, manifest["samples"])
    _expect(where, "items", index.num_items, manifest["items"])
    _expect(where, "content_hash", index.content_hash, manifest["content_hash"])
    return index


def _expect(where: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise IndexMismatch(
            f"{where}: {what} is {found}, expected {expected}; index and data do not belong "
            "together: restore the objects or ingest the source again"
        )


def _to_parquet(index: SourceIndex) -> bytes:
    columns: dict[str, pa.Array] = {"key": pa.array(index.key, pa.string())}
    columns |= {name: pa.array(getattr(index, name)) for name in SAMPLE_COLUMNS}
    for group, names in GROUPS.items():
        pointer = getattr(index, f"{group}_ptr")
        columns |= {name: _lists(pointer, getattr(index, name)) for name in names}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()


def _lists(pointer: NDArray[np.int64], values: NDArray[Any]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(pointer), pa.array(values))


def _from_parquet(data: bytes, manifest: dict[str, Any]) -> SourceIndex:
    table = pq.read_table(pa.BufferReader(data))

    def flat(name: str, kind: Any) -> NDArray[Any]:
        column = table.column(name).combine_chunks()
        values = column.flatten() if pa.types.is_large_list(column.type) else column
        return values.to_numpy(zero_copy_only=False).astype(kind)

    def pointer(group: str) -> NDArray[np.int64]:
        column = table.column(next(iter(GROUPS[group]))).combine_chunks()
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    return SourceIndex(
        name=manifest["name"],
        category=manifest["category"],
        shards=tuple(ShardInfo(**shard) for shard in manifest["shards"]),
        key=table.column("key").combine_chunks(),
        tokenizer_name=manifest["tokenizer"]["name"],
        tokenizer_hash=manifest["tokenizer"]["sha256"],
        **{f"{group}_ptr": pointer(group) for group in GROUPS},
        **{name: flat(name, kind) for name, kind in COLUMNS.items()},
    )


def sample_span(index: SourceIndex, sample: int) -> Span:
    """Where a sample's JSON lies."""
    shard = index.shards[index.shard[sample]].key
    return Span(shard, int(index.json_offset[sample]), int(index.json_length[sample]))


def item_span(index: SourceIndex, item: int) -> Span:
    """Where the media file of an item lies (chunks of one video give equal spans)."""
    sample = int(np.searchsorted(index.item_ptr, item, side="right")) - 1
    shard = index.shards[index.shard[sample]].key
    return Span(shard, int(index.item_offset[item]), int(index.item_length[item]))


def read_samples(
    store: Store, index: SourceIndex, samples: Sequence[int], threads: int = 8
) -> list[dict[str, Any]]:
    """The JSON documents of some samples, each checked against its CRC.

    Raises:
        IndexMismatch: naming the shard, the sample, the value and the expected one.
    """
    texts = get_many(store, [sample_span(index, i) for i in samples], threads=threads)
    for i, text in zip(samples, texts, strict=True):
        check_crc(text, int(index.json_crc[i]), _where(store, index, i))
    return [json.loads(text) for text in texts]


def check_crc(data: bytes, expected: int, where: str) -> None:
    """Raise IndexMismatch unless `data` has the CRC-32 from the index."""
    if (found := zlib.crc32(data)) != expected:
        _expect(where, "CRC-32", f"{found:08x}", f"{expected:08x}")


def _where(store: Store, index: SourceIndex, sample: int) -> str:
    shard = index.shards[index.shard[sample]].key
    return f"{store.uri}/{shard}, sample {index.key_of(sample)!r}"


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
    spans: list[Span] = []
    checks: list[tuple[int, int]] = []  # (expected CRC, sample), one per span
    for number in chosen:
        info = index.shards[number]
        _expect(f"{store.uri}/{info.key}", "size", store.head(info.key).size, info.size)
        first, end = np.searchsorted(index.shard, [number, number + 1])
        if first == end:
            continue
        sample = int(first + end) // 2
        spans.append(sample_span(index, sample))
        checks.append((int(index.json_crc[sample]), sample))
        for item in range(index.item_ptr[sample], index.item_ptr[sample + 1]):
            spans.append(item_span(index, item))
            checks.append((int(index.item_crc[item]), sample))
    for data, (crc, sample) in zip(get_many(store, spans, threads=threads), checks, strict=True):
        check_crc(data, crc, _where(store, index, sample))
    return len(chosen)
