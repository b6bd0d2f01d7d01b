"""What a source holds: where every sample and medium lies, how large it is, and how to check it.

One Parquet file with a row per sample (items are list columns) and one small JSON manifest that
names its hash, the shards' hashes and the tokenizer. The planner needs nothing else: which tokens a
sample has follows from these columns and `moonvit3d.geometry`, so planning reads no data bytes.

The manifest is written last and is what makes a source exist. Reading checks the manifest's schema,
the index against the manifest, and every byte range against its CRC-32 from the index.
"""

import hashlib
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from data_pipeline.store import MissingKey, Span, Store, get_many

SCHEMA = "kimi-pretrain/source/1"

# Column -> dtype. `Any`, so that what is made from them may stand for any typed column.
SAMPLE_COLUMNS: dict[str, Any] = {
    "shard": np.int32,
    "json_offset": np.int64,
    "json_length": np.int64,
    "json_crc": np.uint32,
    "text_tokens": np.int32,
}
ITEM_COLUMNS: dict[str, Any] = {
    "item_kind": np.int8,
    "item_media": np.int16,
    "item_chunk": np.int16,
    "item_frames": np.int16,
    "item_height": np.int32,
    "item_width": np.int32,
    "item_offset": np.int64,
    "item_length": np.int64,
    "item_crc": np.uint32,
    "item_text_before": np.int32,
    "item_prefix": np.int32,
}
COLUMNS = {**SAMPLE_COLUMNS, **ITEM_COLUMNS}


class IndexMismatch(Exception):
    """Index, manifest and shards do not belong together, or bytes were damaged at rest."""


@dataclass(frozen=True)
class ShardInfo:
    """One tar file: its key in the store, bytes, SHA-256 (hex) and number of samples."""

    key: str
    size: int
    sha256: str
    samples: int


@dataclass(frozen=True, eq=False)
class SourceIndex:
    """Columns of N samples and M items (an item is an image or one video chunk), read-only.

    Attributes:
        name: name of the source, the folder it lies in.
        shards: the tar files, in the order the `shard` column counts them.
        key: N sample keys, as a list or an Arrow array; use `key_of`.
        shard: int32 [N], grouped: never decreasing.
        json_offset, json_length: int64 [N], bytes of the sample's JSON in its shard.
        json_crc: uint32 [N], CRC-32 of those bytes.
        text_tokens: int32 [N], tokens of all text segments, without bos and eos.
        segment_ptr: int64 [N+1] into segment_tokens: int32, tokens of each text segment.
        item_ptr: int64 [N+1] into the item columns, items in the order of the sample.
        item_kind: int8 [M], 0 image, 1 video chunk.
        item_media: int16 [M], which media file of the sample. item_chunk: which chunk of it.
        item_frames: int16 [M], 1 ... 4. item_height, item_width: int32 [M], source pixels.
        item_offset, item_length, item_crc: the media file in the shard; chunks of a video share it.
        item_text_before: int32 [M], text tokens of the sample before the item.
        item_prefix: int32 [M], layout tokens before the pads (with a chunk's timestamp).
        tokenizer_name, tokenizer_hash: of the tokenizer that counted the tokens.

    The length of a sample is 2 + text_tokens + sum over its items of (item_prefix + pads + 1).
    """

    name: str
    shards: tuple[ShardInfo, ...]
    key: Sequence[str] | pa.Array
    shard: NDArray[np.int32]
    json_offset: NDArray[np.int64]
    json_length: NDArray[np.int64]
    json_crc: NDArray[np.uint32]
    text_tokens: NDArray[np.int32]
    segment_ptr: NDArray[np.int64]
    segment_tokens: NDArray[np.int32]
    item_ptr: NDArray[np.int64]
    item_kind: NDArray[np.int8]
    item_media: NDArray[np.int16]
    item_chunk: NDArray[np.int16]
    item_frames: NDArray[np.int16]
    item_height: NDArray[np.int32]
    item_width: NDArray[np.int32]
    item_offset: NDArray[np.int64]
    item_length: NDArray[np.int64]
    item_crc: NDArray[np.uint32]
    item_text_before: NDArray[np.int32]
    item_prefix: NDArray[np.int32]
    tokenizer_name: str
    tokenizer_hash: str

    _COLUMNS: ClassVar[tuple[str, ...]] = (
        *SAMPLE_COLUMNS,
        *("segment_ptr", "segment_tokens", "item_ptr"),
        *ITEM_COLUMNS,
    )

    def __post_init__(self) -> None:
        n, m = self.num_samples, self.num_items
        expected = {name: n for name in SAMPLE_COLUMNS} | {name: m for name in ITEM_COLUMNS}
        expected |= {"key": n, "item_ptr": n + 1, "segment_ptr": n + 1}
        expected["segment_tokens"] = int(self.segment_ptr[-1]) if len(self.segment_ptr) else 0
        for name, length in expected.items():
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"source {self.name!r}: column {name} has {len(getattr(self, name))} entries, "
                    f"expected {length} ({n} samples, {m} items)"
                )
        if n and (np.any(np.diff(self.shard) < 0) or self.shard[-1] >= len(self.shards)):
            raise ValueError(
                f"source {self.name!r}: column shard must be grouped and name one of the "
                f"{len(self.shards)} shards"
            )
        for name in self._COLUMNS:
            getattr(self, name).flags.writeable = False

    def __repr__(self) -> str:
        return (
            f"SourceIndex({self.name!r}, samples={self.num_samples}, items={self.num_items}, "
            f"shards={len(self.shards)})"
        )

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.text_tokens)

    @property
    def num_items(self) -> int:
        """M, images and video chunks."""
        return int(self.item_ptr[-1]) if len(self.item_ptr) else 0

    def key_of(self, sample: int) -> str:
        """The key of a sample, for messages."""
        return str(self.key[int(sample)])

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) over all columns, the shards' hashes and the tokenizer's.

        Unlike the hash of the Parquet file it does not depend on the version that wrote it.
        """
        digest = hashlib.sha256(f"{SCHEMA}\n{self.tokenizer_hash}\n".encode())
        for shard in self.shards:
            digest.update(f"{shard.sha256} {shard.size} {shard.samples}\n".encode())
        for name in self._COLUMNS:
            digest.update(f"{name}\n".encode() + getattr(self, name).tobytes())
        digest.update("\n".join(pa.array(self.key, pa.string()).to_pylist()).encode())
        return digest.hexdigest()

    @classmethod
    def from_columns(
        cls,
        name: str,
        text_tokens: ArrayLike,
        *,
        key: Sequence[str] | None = None,
        shards: Sequence[ShardInfo] | None = None,
        segment_ptr: ArrayLike | None = None,
        segment_tokens: ArrayLike | None = None,
        item_ptr: ArrayLike | None = None,
        tokenizer_name: str = "none",
        tokenizer_hash: str = "",
        **columns: ArrayLike,
    ) -> "SourceIndex":
        """Build an index from plain arrays; a column left out is zero (item_frames one).

        Without `shards` there is one empty one per number in the `shard` column, without
        segment columns each sample is a single text segment, without `item_ptr` there are no items.
        """
        text = np.asarray(text_tokens)
        if unknown := sorted(set(columns) - set(COLUMNS)):
            raise ValueError(f"source {name!r}: unknown columns {unknown}")
        pointer = np.zeros(len(text) + 1, np.int64) if item_ptr is None else np.asarray(item_ptr)
        lengths = {c: len(text) for c in SAMPLE_COLUMNS} | {c: pointer[-1] for c in ITEM_COLUMNS}
        columns = {"item_frames": np.ones(pointer[-1]), **columns, "text_tokens": text}
        filled = {
            column: np.array(columns.get(column, np.zeros(lengths[column])), dtype=kind)
            for column, kind in COLUMNS.items()
        }
        if shards is None:
            counts = np.bincount(filled["shard"]) if len(text) else np.zeros(0, int)
            shards = [ShardInfo(f"{name}/{i}.tar", 0, "", int(c)) for i, c in enumerate(counts)]
        if segment_ptr is None or segment_tokens is None:
            segment_ptr, segment_tokens = np.arange(len(text) + 1), text
        return cls(
            name=name,
            shards=tuple(shards),
            key=[f"{i:06d}" for i in range(len(text))] if key is None else key,
            segment_ptr=np.array(segment_ptr, np.int64),
            segment_tokens=np.array(segment_tokens, np.int32),
            item_ptr=np.array(pointer, np.int64),
            tokenizer_name=tokenizer_name,
            tokenizer_hash=tokenizer_hash,
            **filled,
        )


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
    columns["segment_tokens"] = _lists(index.segment_ptr, index.segment_tokens)
    columns |= {name: _lists(index.item_ptr, getattr(index, name)) for name in ITEM_COLUMNS}
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

    def pointer(name: str) -> NDArray[np.int64]:
        lengths = table.column(name).combine_chunks().value_lengths().to_numpy()
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    return SourceIndex(
        name=manifest["name"],
        shards=tuple(ShardInfo(**shard) for shard in manifest["shards"]),
        key=table.column("key").combine_chunks(),
        segment_ptr=pointer("segment_tokens"),
        segment_tokens=flat("segment_tokens", np.int32),
        item_ptr=pointer("item_kind"),
        tokenizer_name=manifest["tokenizer"]["name"],
        tokenizer_hash=manifest["tokenizer"]["sha256"],
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
