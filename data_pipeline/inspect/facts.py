"""Facts of a source: one flat Parquet file for statistics, with a row per sample and per item.

Token counts come from `plan.layout` under given patch limits, so they equal the loader's, and
readers of the file need not know the rules. The file depends only on the source's content and the
limits: FOLDER/CONTENT_HASH/IMAGE-FRAME-SIDE/facts.parquet. It is written once, in parts of bounded
memory. Sample rows and item rows are in separate row groups, so that a reader of one kind skips the
other.
"""

import json
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_pipeline.index.columns import PIECE_REGION, SourceIndex
from data_pipeline.index.manifest import IndexMismatch, expect, read_manifest
from data_pipeline.index.parts import index_parts
from data_pipeline.inspect.duplicates import file_fingerprint, sample_fingerprint
from data_pipeline.inspect.stats import scaled_down
from data_pipeline.plan.csr import row_sums
from data_pipeline.plan.layout import Layout, lay_out
from data_pipeline.store.open import Store
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, PatchLimits

SCHEMA = "kimi-pretrain/facts/1"
"""Version; changes with the columns and with the rules for counting tokens."""

FILE = "facts.parquet"
SAMPLE, IMAGE, CHUNK = 0, 1, 2
"""Values of the column `kind`: the kind of a row."""

REGIONS = ("points", "boxes", "polygons", "turns")  # in the order of `augment.regions`
_ABOUT = b"facts"  # key in the file's metadata
_HASH = re.compile(r"[0-9a-f]{64}")

_KEYS = {"kind": pa.int8(), "sample": pa.int64(), "tokens": pa.int64(), "fingerprint": pa.uint64()}
SAMPLE_FACTS: dict[str, pa.DataType] = {
    "key": pa.string(),
    "shard": pa.int32(),
    **dict.fromkeys(("text_tokens", "region_tokens", "media_tokens"), pa.int64()),
    **dict.fromkeys(("json_bytes", "media_bytes"), pa.int64()),
    **dict.fromkeys(("items", "images", "videos", *REGIONS), pa.int32()),
    **dict.fromkeys(("texts_with_variants", "variants"), pa.int32()),
    **dict.fromkeys(("flip_ok", "turn_ok"), pa.bool_()),
}
ITEM_FACTS: dict[str, pa.DataType] = {
    **dict.fromkeys(("media", "chunk", "frames"), pa.int16()),
    **dict.fromkeys(("height", "width"), pa.int32()),
    "bytes": pa.int64(),
    "scaled_down": pa.bool_(),
}
COLUMNS = pa.schema(list((_KEYS | SAMPLE_FACTS | ITEM_FACTS).items()))
"""`tokens` of a sample are all of its tokens, of an item only its media pads. `bytes` and
`fingerprint` of an item are those of its file, null except at the first chunk of a video. The upper
half of a `fingerprint` is the number of bytes, the lower half a checksum: for a file its CRC-32,
for a sample a hash of the lengths and CRC-32s of its document and files."""


class FactsFile(NamedTuple):
    """A facts file and the attributes of its source.

    Attributes:
        path: path of the file.
        about: schema, category, content_hash, tokenizer_hash, limits; numbers of samples, items and
            shards; bytes of the shards.
        name, tokenizer: names of the source and of its tokenizer, which are not part of the file.
        shards: SHA-256 (hex) of the source's shards.
    """

    path: Path
    about: dict[str, Any]
    name: str
    tokenizer: str
    shards: frozenset[str]


def facts_path(folder: Path, content_hash: str, limits: PatchLimits) -> Path:
    """Return the path of the facts of a content hash under some limits.

    Raises:
        IndexMismatch: the untrusted hash is not 64 hexadecimal digits.
    """
    if not isinstance(content_hash, str) or not _HASH.fullmatch(content_hash):
        raise IndexMismatch(f"content_hash is {content_hash!r:.80}, expected hexadecimal digits")
    return folder / content_hash / f"{limits.image}-{limits.frame}-{limits.side}" / FILE


def write_facts(
    store: Store,
    name: str,
    limits: PatchLimits,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[FactsFile, bool]:
    """Write the facts of a source unless they exist.

    Args:
        store: root that holds the source.
        name: name of the source.
        limits: patch limits, which determine the tokens of images and frames.
        folder: folder of all facts; several machines may share it.
        progress: called with (samples done, total samples).

    Returns:
        The facts, and True if this call wrote them.

    Raises:
        MissingKey, IndexMismatch, ValueError: as for `read_index`; no files are left behind.
        OSError: the folder cannot be written.
    """
    manifest = read_manifest(store, name)
    about = _about(manifest, limits)
    path = facts_path(folder, about["content_hash"], limits)
    shards = frozenset(shard["sha256"] for shard in manifest["shards"])
    file = FactsFile(path, about, name, manifest["tokenizer"]["name"], shards)
    if _known(path) == about:
        return file, False
    path.parent.mkdir(parents=True, exist_ok=True)
    # Temporary files are unique per writer, so concurrent writers of the same facts do not
    # conflict; the last one replaces equal rows.
    mark = f"{os.getpid()}-{secrets.token_hex(4)}"
    copy, unfinished = (path.with_name(f".{kind}-{mark}") for kind in ("index", "facts"))
    try:
        _write(store, name, limits, about, copy, unfinished, progress)
        os.replace(unfinished, path)
    finally:
        for one in (copy, unfinished):
            one.unlink(missing_ok=True)
    return file, True


def _about(manifest: dict[str, Any], limits: PatchLimits) -> dict[str, Any]:
    """Return the file's metadata, which contains no name or location of the source."""
    shards = manifest["shards"]
    return {
        "schema": SCHEMA,
        "category": manifest["category"],
        "content_hash": manifest["content_hash"],
        "tokenizer_hash": manifest["tokenizer"]["sha256"],
        "limits": {"image": limits.image, "frame": limits.frame, "side": limits.side},
        "samples": manifest["samples"],
        "items": manifest["items"],
        "shards": len(shards),
        "bytes": sum(shard["size"] for shard in shards),
    }


def _known(path: Path) -> dict[str, Any] | None:
    """Return the metadata of existing facts; None if there is no readable file."""
    try:
        found = (pq.read_schema(path).metadata or {}).get(_ABOUT)
        return None if found is None else json.loads(found)
    except (FileNotFoundError, pa.ArrowInvalid):  # a truncated file is written again
        return None


def _write(
    store: Store,
    name: str,
    limits: PatchLimits,
    about: dict[str, Any],
    copy: Path,
    out: Path,
    progress: Callable[[int, int], None],
) -> None:
    schema = COLUMNS.with_metadata({_ABOUT: json.dumps(about).encode()})
    done = 0
    with pq.ParquetWriter(out, schema, **_ENCODING) as writer:
        for part in index_parts(store, name, copy):
            for table in facts_of(part, limits, done):
                if table.num_rows:
                    writer.write_table(table, row_group_size=table.num_rows)
            done += part.num_samples
            progress(done, about["samples"])
    expect(f"{store.uri}/{name}", "samples", done, about["samples"])


# Dictionary encoding costs time and saves no bytes for columns whose values rarely repeat.
_PLAIN = ("sample", "fingerprint", "key", "bytes", "json_bytes", "media_bytes")
_ENCODING: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": [name for name in COLUMNS.names if name not in _PLAIN],
    "write_statistics": ["kind", "sample", "shard"],
}


def facts_of(index: SourceIndex, limits: PatchLimits, first: int = 0) -> tuple[pa.Table, pa.Table]:
    """Return the sample rows and the item rows of an index.

    Args:
        index: index of a source or of a part of its samples.
        limits: patch limits.
        first: number of the part's first sample in its source.
    """
    number = np.arange(index.num_samples)
    sizes = lay_out(index, limits, number, np.zeros(number.size, np.int8))
    return (
        _rows(SAMPLE_FACTS, _sample_columns(index, sizes) | {"sample": first + number}),
        _rows(ITEM_FACTS, _item_columns(index, sizes, first)),
    )


def _sample_columns(index: SourceIndex, sizes: Layout) -> dict[str, Any]:
    opening = index.item_chunk == 0  # every media file has one
    written = np.where(index.piece_kind == PIECE_REGION, index.piece_tokens, 0)
    more = index.piece_variants - 1
    media_bytes = row_sums(np.where(opening, index.item_length, 0), index.item_ptr)
    return {
        "kind": np.full(index.num_samples, SAMPLE, np.int8),
        "tokens": sizes.length,
        "fingerprint": file_fingerprint(index.json_length + media_bytes, _half(index)),
        "key": index.key,
        "shard": index.shard,
        "text_tokens": index.text_tokens,
        "region_tokens": row_sums(written, index.piece_ptr),
        "media_tokens": sizes.vision,
        "json_bytes": index.json_length,
        "media_bytes": media_bytes,
        "items": np.diff(index.item_ptr),
        "images": row_sums(opening & (index.item_kind == KIND_IMAGE), index.item_ptr),
        "videos": row_sums(opening & (index.item_kind == KIND_VIDEO), index.item_ptr),
        **{
            name: row_sums(index.region_shape == code, index.region_ptr)
            for code, name in enumerate(REGIONS)
        },
        "texts_with_variants": row_sums(more > 0, index.piece_ptr),
        "variants": row_sums(more, index.piece_ptr),
        "flip_ok": index.flip_ok,
        "turn_ok": index.turn_ok,
    }


def _half(index: SourceIndex) -> NDArray[np.uint32]:
    """Return each sample's fingerprint folded to 32 bits, the width of a CRC-32."""
    whole = sample_fingerprint(index)
    return (whole ^ (whole >> np.uint64(32))).astype(np.uint32)


def _item_columns(index: SourceIndex, sizes: Layout, first: int) -> dict[str, Any]:
    later = index.item_chunk != 0
    file = file_fingerprint(index.item_length, index.item_crc)
    return {
        "kind": np.where(index.item_kind == KIND_IMAGE, IMAGE, CHUNK),
        "sample": np.repeat(first + np.arange(index.num_samples), np.diff(index.item_ptr)),
        "tokens": sizes.tokens,
        "fingerprint": pa.array(file, mask=later),
        "media": index.item_media,
        "chunk": index.item_chunk,
        "frames": index.item_frames,
        "height": index.item_height,
        "width": index.item_width,
        "bytes": pa.array(index.item_length, mask=later),
        "scaled_down": scaled_down(index, sizes.grid),
    }


def _rows(own: dict[str, pa.DataType], columns: dict[str, NDArray[Any] | pa.Array]) -> pa.Table:
    """Return columns as rows of the file; columns of the other row kind are null."""
    rows = len(columns["sample"])
    arrays = [
        _array(columns[field.name], field.type)
        if field.name in own or field.name in _KEYS
        else pa.nulls(rows, field.type)
        for field in COLUMNS
    ]
    return pa.Table.from_arrays(arrays, schema=COLUMNS)


def _array(values: NDArray[Any] | pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.array(values).cast(kind)
