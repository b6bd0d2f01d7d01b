"""Samples to a source: shards, index and manifest, so that training never has to look twice.

Everything that planning needs is found out here, once: token counts, pixel sizes, byte ranges and
checksums. Every medium is decoded once; what does not decode is refused here, with the reason in
`<name>/rejected.jsonl`, and not in the middle of a run.

A source becomes visible with its manifest, which is put last. An ingest that stops half-way leaves
shards that nothing refers to; running it again overwrites them with the same bytes.
"""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_pipeline.decode import verify
from data_pipeline.index import COLUMNS, ShardInfo, SourceIndex
from data_pipeline.manifest import manifest_key, write_index
from data_pipeline.shards import Member, ShardBuilder, check_sample_key, padded, sample_json
from data_pipeline.store import MissingBucket, MissingKey, Store
from data_pipeline.text import Tokenizer
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, video_chunks
from moonvit3d.media import MediaError, is_turned

# Per kind: suffix as given -> suffix in the shard, and the bytes that a file of it has at `at`.
_SUFFIXES = {
    KIND_IMAGE: {
        "png": ("png", 0, b"\x89PNG"),
        "jpg": ("jpg", 0, b"\xff\xd8"),
        "jpeg": ("jpg", 0, b"\xff\xd8"),
    },
    KIND_VIDEO: {"mp4": ("mp4", 4, b"ftyp")},
}
DEFAULT_SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class TextSegment:
    """Text; with `loss` false the model reads it but is not trained to write it."""

    text: str
    loss: bool = True


@dataclass(frozen=True)
class ImageSegment:
    """A PNG or JPEG file as it is; suffix "png" or "jpg"."""

    data: bytes
    suffix: str


@dataclass(frozen=True)
class VideoSegment:
    """An MP4 file as it is; suffix "mp4"."""

    data: bytes
    suffix: str = "mp4"


Segment = TextSegment | ImageSegment | VideoSegment


@dataclass(frozen=True)
class CrudeSample:
    """What a source hands in. `meta` is free JSON (boxes, origin, ...) kept beside the segments."""

    key: str
    segments: Sequence[Segment]
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class IngestPolicy:
    """What is too large to be worth training on.

    Args:
        max_text_tokens: text tokens of a sample, below 2**31.
        max_items: images and video chunks of a sample, below 2**15.
        max_media_bytes: bytes of one media file.
    """

    max_text_tokens: int = 1 << 20
    max_items: int = 4096
    max_media_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        # The index columns are int32 and int16.
        if self.max_text_tokens >= 2**31 or self.max_items >= 2**15:
            raise ValueError(
                f"max_text_tokens {self.max_text_tokens} must be below 2**31 and max_items "
                f"{self.max_items} below 2**15"
            )


@dataclass(frozen=True)
class Rejection:
    """A sample that was left out: a short reason to count by, and the detail."""

    key: str
    reason: str
    detail: str


@dataclass(frozen=True)
class IngestProgress:
    """Counts so far. `turned`: images whose EXIF orientation is not upright (never applied)."""

    samples: int
    rejected: int
    items: int
    shards: int
    bytes: int
    turned: int


@dataclass(frozen=True)
class _Item:
    kind: int
    media: int
    chunk: int
    frames: int
    height: int
    width: int
    text_before: int
    prefix: int
    timestamp: str = ""


@dataclass(frozen=True)
class _Prepared:
    """A sample ready to be written, checked and measured."""

    key: str
    document: bytes
    media: list[tuple[str, bytes]]
    segment_tokens: list[int]
    items: list[_Item]
    turned: int


class _Refused(Exception):
    """Carries (reason, detail) from the checks to the rejection list."""


def ingest(
    samples: Iterable[CrudeSample],
    store: Store,
    name: str,
    tokenizer: Tokenizer,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    policy: IngestPolicy | None = None,
    progress: Callable[[IngestProgress], None] | None = None,
    rejected: Callable[[Rejection], None] | None = None,
) -> SourceIndex:
    """Write a source: `<name>/000000.tar` ..., rejected.jsonl, index.parquet, manifest.json.

    The same samples in the same order with the same tokenizer give the same bytes.

    Args:
        samples: read once, in order; one shard at a time is held in memory.
        store: where to write.
        name: name of the source, letters, digits, '_' and '-'.
        tokenizer: counts the tokens; its name and hash go into the manifest.
        shard_bytes: largest size of a shard (one larger sample still makes a shard of its own).
        policy: sizes above which a sample is rejected.
        progress: called after every shard.
        rejected: called for every rejected sample, as it happens.

    Raises:
        ValueError: bad name or shard size, a finished source of this name, or no sample left.
    """
    _check_request(store, name, shard_bytes)
    source = _Source(store, name, tokenizer, shard_bytes, progress or (lambda _: None))
    seen: set[str] = set()
    policy = policy or IngestPolicy()
    for sample in samples:
        try:
            _check_new(sample.key, seen)
            source.add(_prepare(sample, tokenizer, policy))
        except _Refused as refusal:
            rejection = Rejection(str(sample.key), *refusal.args)
            source.rejections.append(rejection)
            if rejected:
                rejected(rejection)
    return source.finish()


def _check_request(store: Store, name: str, shard_bytes: int) -> None:
    if "/" in name:
        raise ValueError(f"source name {name!r}: use letters, digits, '_' and '-'")
    check_sample_key(name)
    if shard_bytes < 1 << 12:
        raise ValueError(f"shard_bytes {shard_bytes}: a shard holds at least 4096 bytes")
    try:
        store.head(manifest_key(name))
    except (MissingKey, MissingBucket):
        # Shows now, and not after a shard's worth of work, that one may write here.
        store.put(f"{name}/rejected.jsonl", b"")
        return
    raise ValueError(
        f"{store.uri}/{name}: a finished source of this name exists, and runs may be reading it; "
        "choose another name, or delete the folder first"
    )


def _check_new(key: str, seen: set[str]) -> None:
    try:
        check_sample_key(key)
    except ValueError as error:
        raise _Refused("bad key", str(error)) from None
    if key in seen:
        raise _Refused("key twice", "an earlier sample has this key")
    seen.add(key)


def _prepare(sample: CrudeSample, tokenizer: Tokenizer, policy: IngestPolicy) -> _Prepared:
    """Check and measure a sample; pure. Raises _Refused."""
    described: list[dict[str, Any]] = []
    media: list[tuple[str, bytes]] = []
    tokens: list[int] = []
    items: list[_Item] = []
    turned = 0
    for number, segment in enumerate(sample.segments):
        if isinstance(segment, TextSegment):
            described.append({"kind": "text", "text": segment.text, "loss": bool(segment.loss)})
            tokens.append(len(tokenizer.encode(segment.text)))
            continue
        kind = KIND_IMAGE if isinstance(segment, ImageSegment) else KIND_VIDEO
        suffix = _check_file(segment, kind, number, policy)
        try:
            measured = _measure(segment.data, kind, len(media), sum(tokens), tokenizer)
            turned += kind == KIND_IMAGE and is_turned(segment.data)
        except MediaError as error:
            raise _Refused("undecodable", f"segment {number}: {error}") from None
        items += measured
        file = f"{len(media)}.{suffix}"
        media.append((file, segment.data))
        if kind == KIND_IMAGE:
            described.append({"kind": "image", "file": file})
        else:  # the timestamps are text: who lays out rows must not need the video for them
            timestamps = [item.timestamp for item in measured]
            described.append({"kind": "video", "file": file, "timestamps": timestamps})
    _check_sizes(sum(tokens), len(items), policy)
    try:
        document = sample_json(described, sample.meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Refused("not JSON", str(error)) from None
    return _Prepared(sample.key, document, media, tokens, items, turned)


def _check_file(
    segment: ImageSegment | VideoSegment, kind: int, number: int, policy: IngestPolicy
) -> str:
    """The suffix the file gets in the shard."""
    known = _SUFFIXES[kind]
    given = segment.suffix.lower().removeprefix(".")
    if given not in known:
        raise _Refused(
            "unknown suffix", f"segment {number}: {segment.suffix!r}; known: {', '.join(known)}"
        )
    suffix, at, mark = known[given]
    if segment.data[at : at + len(mark)] != mark:
        raise _Refused(
            "undecodable", f"segment {number}: the file does not begin as a {given} file does"
        )
    if len(segment.data) > policy.max_media_bytes:
        raise _Refused(
            "too large",
            f"segment {number}: {len(segment.data)} bytes, at most {policy.max_media_bytes}",
        )
    return suffix


def _check_sizes(text_tokens: int, num_items: int, policy: IngestPolicy) -> None:
    if not text_tokens and not num_items:
        raise _Refused("empty", "no text and no media")
    if text_tokens > policy.max_text_tokens:
        raise _Refused("too large", f"{text_tokens} text tokens, at most {policy.max_text_tokens}")
    if num_items > policy.max_items:
        raise _Refused(
            "too large", f"{num_items} images and video chunks, at most {policy.max_items}"
        )


def _measure(
    data: bytes, kind: int, media: int, text_before: int, tokenizer: Tokenizer
) -> list[_Item]:
    """The items a media file gives: one image, or a video's chunks. Decodes the whole file."""
    found = verify(data, kind)
    if kind == KIND_IMAGE:
        prefix = len(tokenizer.image_prefix())
        return [_Item(kind, media, 0, 1, found.height, found.width, text_before, prefix)]
    return [
        _Item(
            kind=kind,
            media=media,
            chunk=number,
            frames=len(chunk.frames),
            height=found.height,
            width=found.width,
            text_before=text_before,
            prefix=len(tokenizer.video_prefix(chunk.timestamp)),
            timestamp=chunk.timestamp,
        )
        for number, chunk in enumerate(video_chunks(found.frames, found.fps))
    ]


class _Source:
    """Grows the columns of an index and puts a shard whenever one is full."""

    def __init__(
        self,
        store: Store,
        name: str,
        tokenizer: Tokenizer,
        shard_bytes: int,
        progress: Callable[[IngestProgress], None],
    ) -> None:
        self.rejections: list[Rejection] = []
        self._store, self._name, self._tokenizer = store, name, tokenizer
        self._shard_bytes, self._progress = shard_bytes, progress
        self._builder = ShardBuilder()
        self._shards: list[ShardInfo] = []
        self._keys: list[str] = []
        # Typed arrays: ten million samples take hundreds of megabytes, not tens of gigabytes.
        codes = {column: np.dtype(kind).char for column, kind in COLUMNS.items()}
        self._columns = {column: array(code) for column, code in codes.items()}
        self._segments, self._segment_ptr = array("i"), array("q", [0])
        self._item_ptr = array("q", [0])
        self._turned = 0

    def add(self, sample: _Prepared) -> None:
        """Append one sample, closing the shard first if it would grow past its limit."""
        size = sum(padded(len(data)) for data in (sample.document, *(d for _, d in sample.media)))
        if self._builder.samples and self._builder.size + size > self._shard_bytes:
            self._flush()
        document, *media = self._builder.add(sample.key, sample.document, sample.media)
        self._keys.append(sample.key)
        self._append(
            shard=len(self._shards),
            json_offset=document.offset,
            json_length=document.length,
            json_crc=document.crc,
            text_tokens=sum(sample.segment_tokens),
        )
        self._segments.extend(sample.segment_tokens)
        self._segment_ptr.append(len(self._segments))
        for item in sample.items:
            self._append_item(item, media[item.media])
        self._item_ptr.append(self._item_ptr[-1] + len(sample.items))
        self._turned += sample.turned

    def _append_item(self, item: _Item, file: Member) -> None:
        self._append(
            item_kind=item.kind,
            item_media=item.media,
            item_chunk=item.chunk,
            item_frames=item.frames,
            item_height=item.height,
            item_width=item.width,
            item_offset=file.offset,
            item_length=file.length,
            item_crc=file.crc,
            item_text_before=item.text_before,
            item_prefix=item.prefix,
        )

    def _append(self, **values: int) -> None:
        for column, value in values.items():
            self._columns[column].append(value)

    def _flush(self) -> None:
        shard = self._builder.finish()
        key = f"{self._name}/{len(self._shards):06d}.tar"
        self._store.put(key, shard.data)
        self._shards.append(ShardInfo(key, len(shard.data), shard.sha256, shard.samples))
        self._progress(
            IngestProgress(
                samples=len(self._keys),
                rejected=len(self.rejections),
                items=self._item_ptr[-1],
                shards=len(self._shards),
                bytes=sum(info.size for info in self._shards),
                turned=self._turned,
            )
        )

    def finish(self) -> SourceIndex:
        """Put what is left, then the rejections, the index, and the manifest as the last."""
        if not self._keys:
            counts = dict(sorted(Counter(r.reason for r in self.rejections).items()))
            raise ValueError(
                f"source {self._name!r}: no sample left to write; rejected: {counts or 'none'}"
                + (f", first: {self.rejections[0]}" if self.rejections else "")
            )
        if self._builder.samples:
            self._flush()
        lines = (json.dumps(vars(r), ensure_ascii=True) + "\n" for r in self.rejections)
        self._store.put(f"{self._name}/rejected.jsonl", "".join(lines).encode())
        index = SourceIndex(
            name=self._name,
            shards=tuple(self._shards),
            key=self._keys,
            segment_ptr=np.array(self._segment_ptr, np.int64),
            segment_tokens=np.array(self._segments, np.int32),
            item_ptr=np.array(self._item_ptr, np.int64),
            tokenizer_name=self._tokenizer.name,
            tokenizer_hash=self._tokenizer.hash,
            **{c: np.array(self._columns[c], kind) for c, kind in COLUMNS.items()},
        )
        write_index(self._store, index)
        return index
