"""Checks and measures one sample: builds its document, its tar blocks and its index entries.

Pure functions, so samples can be prepared in any process and in any order. Every media file is
decoded once here; a file that does not decode is rejected with a reason, before any training run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from data_pipeline.augment.directions import flip_allowed, turn_allowed
from data_pipeline.decode import verify
from data_pipeline.index.columns import PIECE_ITEM, PIECE_REGION, PIECE_TEXT
from data_pipeline.index.shards import Framed, check_sample_key, frame, sample_json
from data_pipeline.ingest.samples import (
    SHAPES,
    CrudeSample,
    ImageSegment,
    IngestPolicy,
    Refused,
    RegionSegment,
    Segment,
    TextSegment,
    VideoSegment,
    check_region,
    check_text,
)
from data_pipeline.store.json_objects import check_nesting
from data_pipeline.text import Tokenizer
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, video_chunks
from moonvit3d.media import MediaError, Probe

# Per kind: input suffix -> (suffix in the shard, offset, the format's magic bytes at that offset).
SUFFIXES = {
    KIND_IMAGE: {
        "png": ("png", 0, b"\x89PNG"),
        "jpg": ("jpg", 0, b"\xff\xd8"),
        "jpeg": ("jpg", 0, b"\xff\xd8"),
        "webp": ("webp", 8, b"WEBP"),
        "gif": ("gif", 0, b"GIF8"),
    },
    KIND_VIDEO: {"mp4": ("mp4", 4, b"ftyp")},
}


@dataclass(frozen=True)
class Medium:
    """A media file of a sample; `chunks` has (frames, timestamp) of each of its items."""

    kind: int
    suffix: str
    height: int
    width: int
    chunks: list[tuple[int, str]]
    first_item: int


@dataclass(frozen=True)
class Prepared:
    """A sample ready to be written.

    Attributes:
        blocks: its tar blocks.
        columns: its entries in every column of the index except `shard`; offsets are relative to
            the start of `blocks`.
        turned: images and clips with an orientation tag, which is never applied.
    """

    key: str
    blocks: bytes
    columns: dict[str, list[Any]]
    turned: int

    @property
    def sums(self) -> list[tuple[int, int]]:
        """See `index.erased.sums_of`."""
        names = ("json_length", "json_crc"), ("item_length", "item_crc")
        return [sums for pair in names for sums in zip(*(self.columns[name] for name in pair))]


def prepare(
    sample: CrudeSample, category: str, tokenizer: Tokenizer, policy: IngestPolicy
) -> Prepared:
    """Check and measure a sample; raise Refused with a short reason and the detail."""
    try:
        check_sample_key(sample.key)
    except ValueError as error:
        raise Refused("bad key", str(error)) from None
    if not isinstance(sample.meta, dict):
        raise Refused("not JSON", f"meta is {sample.meta!r:.60}, expected an object")
    media, turned = _measure(sample.segments, policy)
    sheet = _Sheet(media, tokenizer)
    for number, segment in enumerate(sample.segments):
        sheet.add(number, segment)
    _check_sizes(sheet, policy)
    try:
        check_nesting({"meta": sample.meta}, "meta")
        document = sample_json(sheet.described, sample.meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused("not JSON", str(error)) from None
    files = [s.data for s in sample.segments if isinstance(s, ImageSegment | VideoSegment)]
    names = [f"{number}.{medium.suffix}" for number, medium in enumerate(media)]
    _check_document(document, sample.meta, policy)
    framed = frame(sample.key, document, list(zip(names, files, strict=True)))
    told = {s.media for s in sample.segments if isinstance(s, RegionSegment) and s.shape == "turn"}
    images = {number for number, medium in enumerate(media) if medium.kind == KIND_IMAGE}
    columns = sheet.columns | _places(framed, sheet.columns["item_media"])
    flip_ok = flip_allowed(category, sheet.texts, has_turn=bool(told))
    columns["flip_ok"] = [flip_ok and sample.meta.get("flip") is not False]
    columns["turn_ok"] = [
        turn_allowed(category, sheet.texts, has_turn=bool(images) and images <= told)
    ]
    return Prepared(sample.key, framed.data, columns, turned)


def _places(framed: Framed, item_media: Sequence[int]) -> dict[str, list[int]]:
    """Return the columns with offset, length and CRC-32 of the document and the media files."""
    document, *media = framed.members
    files = [media[number] for number in item_media]
    return {
        "json_offset": [document.offset],
        "json_length": [document.length],
        "json_crc": [document.crc],
        "item_offset": [file.offset for file in files],
        "item_length": [file.length for file in files],
        "item_crc": [file.crc for file in files],
    }


def _measure(segments: Sequence[Segment], policy: IngestPolicy) -> tuple[list[Medium], int]:
    """Decode and measure every media file; also count those with an orientation tag."""
    media: list[Medium] = []
    turned = items = 0
    end = time.monotonic() + policy.max_video_seconds
    for number, segment in enumerate(segments):
        if not isinstance(segment, ImageSegment | VideoSegment):
            continue
        kind = KIND_IMAGE if isinstance(segment, ImageSegment) else KIND_VIDEO
        suffix = _check_file(segment, kind, number, policy)
        try:
            check = partial(_check_video, number, policy, end) if kind == KIND_VIDEO else None
            found = verify(segment.data, kind, check)
            turned += found.turned
        except MediaError as error:
            raise Refused("undecodable", f"segment {number}: {error}") from None
        chunks = [(1, "")]
        if kind == KIND_VIDEO:
            plan = video_chunks(found.frames, found.fps)
            chunks = [(len(chunk.frames), chunk.timestamp) for chunk in plan]
        media.append(Medium(kind, suffix, found.height, found.width, chunks, items))
        items += len(chunks)
    return media, turned


def _check_video(number: int, policy: IngestPolicy, end: float, found: Probe) -> None:
    """Refuse a video that is too large, before and during decoding.

    File size is no bound: a frame that repeats the previous one takes a few bytes in the file but
    a full frame in the decoder.
    """
    pixels = found.frames * found.height * found.width
    if pixels > policy.max_video_pixels:
        raise Refused(
            "too large",
            f"segment {number}: {found.frames} frames of {found.width} x {found.height}, at most "
            f"{policy.max_video_pixels} pixels in all",
        )
    items = len(video_chunks(found.frames, found.fps)) if found.fps else 0
    if items > policy.max_items:
        raise Refused("too large", f"segment {number}: {items} chunks, at most {policy.max_items}")
    if time.monotonic() > end:
        raise Refused(
            "too slow",
            f"segment {number}: not decoded within {policy.max_video_seconds:g} s",
        )


def _check_document(document: bytes, meta: dict[str, Any], policy: IngestPolicy) -> None:
    if len(document) > policy.max_document_bytes:
        raise Refused(
            "too large", f"a document of {len(document)} bytes, at most {policy.max_document_bytes}"
        )
    size = len(sample_json([], meta)) if meta else 0
    if size > policy.max_meta_bytes:
        raise Refused(
            "too large",
            f"meta of {size} bytes, at most {policy.max_meta_bytes}; fields that the short form "
            "does not know are kept there",
        )


def _check_file(
    segment: ImageSegment | VideoSegment, kind: int, number: int, policy: IngestPolicy
) -> str:
    """Check a media file and return the suffix it gets in the shard."""
    known = SUFFIXES[kind]
    given = segment.suffix.lower().removeprefix(".")
    if given not in known:
        raise Refused(
            "unknown suffix", f"segment {number}: {segment.suffix!r}; known: {', '.join(known)}"
        )
    # The bytes decide the format, because many files have the suffix of another format.
    marks = (mark for mark in known.values() if segment.data.startswith(mark[2], mark[1]))
    suffix, _, _ = next(marks, (None, 0, b""))
    if suffix is None:
        raise Refused(
            "undecodable",
            f"segment {number}: the file does not begin as one of {', '.join(known)} does",
        )
    if len(segment.data) > policy.max_media_bytes:
        raise Refused(
            "too large",
            f"segment {number}: {len(segment.data)} bytes, at most {policy.max_media_bytes}",
        )
    return suffix


class _Sheet:
    """Builds a sample's document and its columns, segment by segment."""

    def __init__(self, media: Sequence[Medium], tokenizer: Tokenizer) -> None:
        self.described: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self.columns: dict[str, list[Any]] = {
            name: []
            for name in (
                "piece_kind", "piece_tokens", "piece_variants", "variant_tokens", "item_kind",
                "item_media", "item_chunk", "item_frames", "item_height", "item_width",
                "region_item", "region_shape", "region_points", "point_x", "point_y",
            )
        }  # fmt: skip
        self.longest = 0  # text tokens with the longest variant of each text
        self._media, self._tokenizer, self._next = media, tokenizer, 0

    def add(self, number: int, segment: Segment) -> None:
        """Append segment `number`."""
        if isinstance(segment, TextSegment):
            self._text(number, segment)
        elif isinstance(segment, RegionSegment):
            self._region(number, segment)
        elif isinstance(segment, ImageSegment | VideoSegment):
            self._medium()
        else:
            raise Refused("bad segment", f"segment {number}: {type(segment).__name__}")

    def _append(self, **values: float) -> None:
        for name, value in values.items():
            self.columns[name].append(value)

    def _encode(self, text: str) -> int:
        try:
            return len(self._tokenizer.encode(text))
        except UnicodeEncodeError as error:
            raise Refused("not JSON", str(error)) from None

    def _text(self, number: int, segment: TextSegment) -> None:
        texts = check_text(segment, number)
        written = {"text": texts[0]} if len(texts) == 1 else {"texts": texts}
        self.described.append({"kind": "text", **written, "loss": bool(segment.loss)})
        tokens = [self._encode(text) for text in texts]
        self._append(piece_kind=PIECE_TEXT, piece_tokens=tokens[0], piece_variants=len(tokens))
        self.columns["variant_tokens"] += tokens[1:]
        self.longest += max(tokens)
        self.texts += texts

    def _medium(self) -> None:
        number, medium = self._next, self._media[self._next]
        self._next += 1
        described: dict[str, Any] = {"file": f"{number}.{medium.suffix}", "kind": "image"}
        if medium.kind == KIND_VIDEO:
            # Timestamps become text in the row, and laying out rows must not need the video.
            stamps = [stamp for _, stamp in medium.chunks]
            described |= {"kind": "video", "timestamps": stamps}
        self.described.append(described)
        for chunk, (frames, stamp) in enumerate(medium.chunks):
            tokens = item_prefix(self._tokenizer, stamp)
            self._append(piece_kind=PIECE_ITEM, piece_tokens=tokens, piece_variants=1)
            self._append(
                item_kind=medium.kind,
                item_media=number,
                item_chunk=chunk,
                item_frames=frames,
                item_height=medium.height,
                item_width=medium.width,
            )

    def _region(self, number: int, segment: RegionSegment) -> None:
        which, count = segment.media, len(self._media)
        if isinstance(which, bool) or not isinstance(which, int) or not 0 <= which < count:
            raise Refused("bad region", f"segment {number}: media {which!r}, there are {count}")
        medium = self._media[which]
        if medium.kind != KIND_IMAGE:
            raise Refused("bad region", f"segment {number}: media {which} is not an image")
        points = check_region(segment, number, medium.width, medium.height)
        described = {
            "kind": "region", "media": which, "shape": segment.shape, "label": segment.label,
            "loss": bool(segment.loss),
        }  # fmt: skip
        turn = segment.shape == "turn"
        numbers = {"degrees": segment.degrees} if turn else {"points": [*map(list, segment.points)]}
        self.described.append(described | numbers)
        count = count_numbers(segment.shape, len(points))
        tokens = self._encode(segment.label) + self._tokenizer.region_length("", count)
        self._append(piece_kind=PIECE_REGION, piece_tokens=tokens, piece_variants=1)
        self._append(
            region_item=medium.first_item,
            region_shape=SHAPES[segment.shape],
            region_points=len(points),
        )
        for x, y in points:
            self._append(point_x=x, point_y=y)
        self.longest += tokens
        self.texts.append(segment.label)


def item_prefix(tokenizer: Tokenizer, timestamp: str) -> int:
    """Count the tokens before the media pads of an image (no timestamp) or a video chunk."""
    if timestamp:
        return len(tokenizer.video_prefix(timestamp))
    return len(tokenizer.image_prefix())


def count_numbers(shape: str, points: int) -> int:
    """Return how many numbers a region is written with."""
    return 1 if shape == "turn" else 2 * points


def _check_sizes(sheet: _Sheet, policy: IngestPolicy) -> None:
    items = len(sheet.columns["item_kind"])
    if not sheet.longest and not items:
        raise Refused("empty", "no text and no media")
    if sheet.longest > policy.max_text_tokens:
        raise Refused("too large", f"{sheet.longest} text tokens, at most {policy.max_text_tokens}")
    if items > policy.max_items:
        raise Refused("too large", f"{items} images and video chunks, at most {policy.max_items}")
