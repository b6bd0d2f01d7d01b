"""Index columns of a source: offset, size and CRC-32 of every sample and media file.

The data planner needs nothing else: the token layout of a sample follows from these columns and
`moonvit3d.geometry`, so planning reads no data bytes. `index.manifest` stores them in files.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SCHEMA = "kimi-pretrain/source/2"

# Allowed categories of a source, which select the augmentation rules and sample templates.
CATEGORIES = (
    "agent",
    "caption",
    "code",
    "grounding",
    "interleaved",
    "knowledge",
    "ocr",
    "text",
    "video",
)

_PART = 1 << 16  # entries processed at a time

# Kinds of pieces; a sample is laid out from its pieces, in order.
PIECE_TEXT, PIECE_ITEM, PIECE_REGION = 0, 1, 2

# Column -> dtype. The type is `Any`, so that arrays of these dtypes pass for any typed column.
SAMPLE_COLUMNS: dict[str, Any] = {
    "shard": np.int32,
    "json_offset": np.int64,
    "json_length": np.int64,
    "json_crc": np.uint32,
    "flip_ok": np.bool_,
    "turn_ok": np.bool_,
}
# A sample has any number of entries per group; `<group>_ptr` holds the offset of its first entry.
GROUPS: dict[str, dict[str, Any]] = {
    "piece": {
        "piece_kind": np.int8,
        "piece_tokens": np.int32,
        "piece_variants": np.int16,
    },
    "variant": {"variant_tokens": np.int32},
    "item": {
        "item_kind": np.int8,
        "item_media": np.int16,
        "item_chunk": np.int16,
        "item_frames": np.int16,
        "item_height": np.int32,
        "item_width": np.int32,
        "item_offset": np.int64,
        "item_length": np.int64,
        "item_crc": np.uint32,
    },
    "region": {
        "region_item": np.int16,
        "region_shape": np.int8,
        "region_points": np.int16,
    },
    "point": {"point_x": np.float32, "point_y": np.float32},
}
LISTED = {name: kind for group in GROUPS.values() for name, kind in group.items()}
COLUMNS = SAMPLE_COLUMNS | LISTED


HASHED = (
    *SAMPLE_COLUMNS,
    *(name for group, columns in GROUPS.items() for name in (f"{group}_ptr", *columns)),
)
"""The columns of a content hash, in hashing order; the sample keys follow them."""


@dataclass(frozen=True)
class ShardInfo:
    """A tar file: key in the store, size in bytes, SHA-256 (hex) and number of samples."""

    key: str
    size: int
    sha256: str
    samples: int


def content_digest(
    category: str, tokenizer_hash: str, shards: Sequence[ShardInfo]
) -> "hashlib._Hash":
    """Return the SHA-256 state of a content hash before its columns are added."""
    digest = hashlib.sha256(f"{SCHEMA}\n{category}\n{tokenizer_hash}\n".encode())
    for shard in shards:
        digest.update(f"{shard.sha256} {shard.size} {shard.samples}\n".encode())
    return digest


@dataclass(frozen=True, eq=False)
class SourceIndex:
    """Read-only columns of N samples and their pieces, variants, items, regions and points.

    A sample has pieces, in order: texts, media items (an image or one video chunk) and regions
    (written coordinates). Text variants, items, regions and the regions' points have separate
    columns; `<group>_ptr` int64 [N+1] holds the offset of each sample's first entry in its group.

    Attributes:
        name: name of the source, which is also its folder.
        category: one of `CATEGORIES`.
        shards: the tar files, in the order of their numbers in the `shard` column.
        key: N sample keys, as a list or an Arrow array; use `key_of`.
        shard: int32 [N], number of the sample's shard, non-decreasing.
        json_offset, json_length: int64 [N], byte range of the sample's JSON in its shard.
        json_crc: uint32 [N], CRC-32 of those bytes.
        flip_ok, turn_ok: bool [N], True if the images may be mirrored or turned by 90 degrees.
        piece_kind: int8 [P], PIECE_TEXT, PIECE_ITEM or PIECE_REGION.
        piece_tokens: int32 [P], tokens of a text (its first variant) or of a written region; for
            an item, the tokens before its media pads (including a chunk's timestamp).
        piece_variants: int16 [P], number of variants of a text; 1 for all other pieces.
        variant_tokens: int32 [V], tokens of the second, third ... variant of each such piece.
        item_kind: int8 [M], 0 image, 1 video chunk.
        item_media: int16 [M], number of the media file in the sample. item_chunk: int16 [M],
            number of the chunk in the file.
        item_frames: int16 [M], 1 ... 4. item_height, item_width: int32 [M], source pixels.
        item_offset, item_length, item_crc: the media file in the shard; chunks of a video share it.
        region_item: int16 [R], number of the region's item in the sample.
        region_shape: int8 [R], see `augment.regions`. region_points: int16 [R], number of points.
        point_x, point_y: float32 [Q], pixels of the file as stored, in edge coordinates.
        tokenizer_name, tokenizer_hash: the tokenizer that counted the tokens.
        index_sha256: SHA-256 (hex) of the index file; "" if the index was not read from a file.
        redacted: samples whose bytes were overwritten, in the order of their redaction; the
            checksums here are those of the new bytes.
        made_as: content_hash before the first redaction; "" if this source was never redacted.

    The length of a sample is 2 + tokens of its pieces + (pads + 1) of each item.
    """

    name: str
    category: str
    shards: tuple[ShardInfo, ...]
    key: Sequence[str] | pa.Array
    shard: NDArray[np.int32]
    json_offset: NDArray[np.int64]
    json_length: NDArray[np.int64]
    json_crc: NDArray[np.uint32]
    flip_ok: NDArray[np.bool_]
    turn_ok: NDArray[np.bool_]
    piece_ptr: NDArray[np.int64]
    piece_kind: NDArray[np.int8]
    piece_tokens: NDArray[np.int32]
    piece_variants: NDArray[np.int16]
    variant_ptr: NDArray[np.int64]
    variant_tokens: NDArray[np.int32]
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
    region_ptr: NDArray[np.int64]
    region_item: NDArray[np.int16]
    region_shape: NDArray[np.int8]
    region_points: NDArray[np.int16]
    point_ptr: NDArray[np.int64]
    point_x: NDArray[np.float32]
    point_y: NDArray[np.float32]
    tokenizer_name: str
    tokenizer_hash: str
    index_sha256: str = ""
    redacted: tuple[int, ...] = ()
    made_as: str = ""

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES:
            raise ValueError(
                f"source {self.name!r}: category is {self.category!r}; known are "
                f"{', '.join(CATEGORIES)}"
            )
        n = self.num_samples
        expected = dict.fromkeys((*SAMPLE_COLUMNS, "key"), n)
        for group, columns in GROUPS.items():
            pointer = getattr(self, f"{group}_ptr")
            expected[f"{group}_ptr"] = n + 1
            expected |= dict.fromkeys(columns, int(pointer[-1]) if len(pointer) else 0)
        for name, length in expected.items():
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"source {self.name!r}: column {name} has {len(getattr(self, name))} entries, "
                    f"expected {length} ({n} samples)"
                )
        self._check_sums()
        if n and not (
            _rises(self.shard) and 0 <= self.shard[0] <= self.shard[-1] < len(self.shards)
        ):
            raise ValueError(
                f"source {self.name!r}: column shard must be grouped and name one of the "
                f"{len(self.shards)} shards"
            )
        for name in HASHED:
            getattr(self, name).flags.writeable = False

    def _check_sums(self) -> None:
        """Check the counts between groups; a wrong count would shift all later offsets."""
        more = int(self.piece_variants.sum(dtype=int)) - len(self.piece_variants)
        for what, counted, entries in (
            ("items", _count(self.piece_kind, PIECE_ITEM), len(self.item_kind)),
            ("regions", _count(self.piece_kind, PIECE_REGION), len(self.region_shape)),
            ("variants", more, len(self.variant_tokens)),
            ("points", int(self.region_points.sum(dtype=int)), len(self.point_x)),
        ):
            if counted != entries:
                raise ValueError(
                    f"source {self.name!r}: {entries} {what} in their columns, but {counted} "
                    "where they are named"
                )

    def __repr__(self) -> str:
        return (
            f"SourceIndex({self.name!r}, samples={self.num_samples}, items={self.num_items}, "
            f"shards={len(self.shards)})"
        )

    @property
    def num_samples(self) -> int:
        """Number of samples N."""
        return len(self.shard)

    @property
    def num_items(self) -> int:
        """Number of images and video chunks M."""
        return len(self.item_kind)

    @cached_property
    def text_tokens(self) -> NDArray[np.int64]:
        """Tokens of each sample's texts (first variants) and written regions, int64 [N]."""
        counted = np.where(self.piece_kind == PIECE_ITEM, 0, self.piece_tokens)
        running = np.concatenate([[0], np.cumsum(counted, dtype=np.int64)])
        return running[self.piece_ptr[1:]] - running[self.piece_ptr[:-1]]

    def key_of(self, sample: int) -> str:
        """Return the key of a sample, for messages."""
        return str(self.key[int(sample)])

    @property
    def shard_ptr(self) -> NDArray[np.int64]:
        """Offset of each shard's first sample, and the end, int64 [shards + 1]."""
        return np.searchsorted(self.shard, np.arange(len(self.shards) + 1))

    @property
    def identity(self) -> str:
        """The original content_hash, by which runs identify the source even after redactions."""
        return self.made_as or self.content_hash

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) over all columns, the shards' hashes and the tokenizer's.

        Unlike the hash of the Parquet file, it does not depend on the library version.
        """
        digest = content_digest(self.category, self.tokenizer_hash, self.shards)
        for name in HASHED:
            digest.update(f"{name}\n".encode() + getattr(self, name).tobytes())
        digest.update("\n".join(pa.array(self.key, pa.string()).to_pylist()).encode())
        return digest.hexdigest()


def _count(column: NDArray[Any], value: int) -> int:
    """Count a value in parts, because the process would keep the memory of a large temporary."""
    parts = range(0, len(column), _PART)
    return sum(int(np.count_nonzero(column[at : at + _PART] == value)) for at in parts)


def _rises(column: NDArray[Any]) -> bool:
    """Return whether the entries never decrease."""
    parts = range(0, len(column), _PART)
    return all((np.diff(column[at : at + _PART + 1]) >= 0).all() for at in parts)
