"""Input samples of an ingest: their segments, and the checks that segments must pass.

A sample has a key, segments in reading order and free `meta`. The same segments, as JSON, are the
sample's document in its shard (see docs/data_format.md). Region coordinates are pixels of the file
as stored, in edge coordinates: the image's top left corner is (0, 0), its bottom right corner is
(width, height).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np

from data_pipeline.store.json_objects import MOST_BYTES

# Shape of a region -> its code in the index.
SHAPES = {"point": 0, "box": 1, "polygon": 2, "turn": 3}
TURNS = (0, 90, 180, 270)


@dataclass(frozen=True)
class TextSegment:
    """Text; with `loss` False it carries no training loss.

    `texts` replaces `text` and holds two or more variants; each draw of the sample uses one of
    them.
    """

    text: str = ""
    loss: bool = True
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class ImageSegment:
    """The bytes of an image file; suffix "png", "jpg", "webp" or "gif" (static)."""

    data: bytes
    suffix: str


@dataclass(frozen=True)
class VideoSegment:
    """The bytes of an MP4 file; suffix "mp4"."""

    data: bytes
    suffix: str = "mp4"


@dataclass(frozen=True)
class RegionSegment:
    """A region of an image, written to the row as its label and its coordinates.

    Args:
        shape: "point", "box", "polygon", or "turn" for the orientation of a whole image.
        points: [[x, y], ...] in pixels: one for a point, [[x1, y1], [x2, y2]] for a box, three or
            more for a polygon, none for a turn.
        label: text before the coordinates, including a trailing space or line break.
        media: number of the media file in the sample, from 0; it must be an image, and its segment
            may come before or after this segment.
        degrees: for a turn, the clockwise rotation of the content: 0, 90, 180 or 270.
        loss: True if the region carries training loss.
    """

    shape: str
    points: Sequence[Sequence[float]] = ()
    label: str = ""
    media: int = 0
    degrees: int | None = None
    loss: bool = True


Segment = TextSegment | ImageSegment | VideoSegment | RegionSegment


@dataclass(frozen=True)
class CrudeSample:
    """A raw sample. `meta` is free JSON, stored with the segments.

    A `meta` of {"flip": false} forbids mirroring the images of this sample.
    """

    key: str
    segments: Sequence[Segment]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Total bytes of its media."""
        media = (s for s in self.segments if isinstance(s, ImageSegment | VideoSegment))
        return sum(len(segment.data) for segment in media)


class Pending(Protocol):
    """A sample that is not read yet; small and picklable, so that another process can read it."""

    @property
    def key(self) -> str:
        """Name of the sample in messages until it is read."""
        ...

    @property
    def size(self) -> int:
        """Approximate size in bytes, for load balancing."""
        ...

    def load(self, policy: "IngestPolicy") -> CrudeSample:
        """Read the sample or raise Refused; files above the policy's limits need not be read."""
        ...


@runtime_checkable
class Reader(Protocol):
    """An input of ingest that can be read from any position.

    Attributes:
        identity: JSON that identifies this input; with None an ingest cannot be resumed.
        total: number of samples, or None if unknown.
    """

    identity: dict[str, Any] | None
    total: int | None

    def read(self, cursor: Any = None) -> Iterator[tuple[Any, CrudeSample | Pending]]:
        """Yield samples in order, each with the cursor (JSON) from which it can be read again."""
        ...


class Listed:
    """Samples of any iterable as a Reader.

    Args:
        samples: read once, in order.
        identity: JSON that changes whenever the samples do. With it, an ingest can be resumed; it
            then skips the finished samples.
        total: number of samples, or None if unknown.
    """

    def __init__(
        self,
        samples: Iterable[CrudeSample | Pending],
        identity: dict[str, Any] | None = None,
        total: int | None = None,
    ) -> None:
        self.identity, self.total = identity, total
        self._samples = samples

    def read(self, cursor: Any = None) -> Iterator[tuple[Any, CrudeSample | Pending]]:
        """See `Reader.read`."""
        start = cursor or 0
        return enumerate(islice(self._samples, start, None), start)


@dataclass(frozen=True)
class IngestPolicy:
    """Limits above which ingest rejects a sample.

    Args:
        max_text_tokens: tokens of a sample's texts and regions, below 2**31.
        max_items: images and video chunks of a sample, below 2**15.
        max_media_bytes: bytes of one media file.
        max_document_bytes: bytes of a text or JSON file, of a manifest line, and of the document
            that is written. Parsed JSON takes thirty times as much memory.
        max_meta_bytes: bytes of `meta` as JSON, which is parsed again at each draw.
        max_video_pixels: pixels of a frame times the number of frames of a video.
        max_video_seconds: time to decode all videos of a sample.
        texts_only: True to leave media files unread; their segments then hold no bytes.
    """

    max_text_tokens: int = 1 << 20
    max_items: int = 4096
    max_media_bytes: int = 1 << 30
    max_document_bytes: int = 16 << 20
    max_meta_bytes: int = 1 << 20
    max_video_pixels: int = 1 << 38
    max_video_seconds: float = 600.0
    texts_only: bool = False

    def __post_init__(self) -> None:
        if self.max_document_bytes > MOST_BYTES:
            raise ValueError(
                f"max_document_bytes {self.max_document_bytes}: at most {MOST_BYTES} are read"
            )
        # The index columns are int32 and int16.
        if self.max_text_tokens >= 2**31 or self.max_items >= 2**15:
            raise ValueError(
                f"max_text_tokens {self.max_text_tokens} must be below 2**31 and max_items "
                f"{self.max_items} below 2**15"
            )


@dataclass(frozen=True)
class Rejection:
    """A rejected sample: a short reason to group counts by, and the detail."""

    key: str
    reason: str
    detail: str


class Refused(Exception):
    """A sample cannot be used; the arguments are (reason, detail)."""


def check_text(segment: TextSegment, number: int) -> list[str]:
    """Check a text segment and return its variants; a plain `text` is its only variant.

    Raises:
        Refused: a variant is not a string, both `text` and `texts` are given, `texts` has only one
            entry, or it has more than 2**15 - 1.
    """
    if segment.texts and segment.text:
        raise Refused("bad text", f"segment {number}: give text or texts, not both")
    if isinstance(segment.texts, str) or len(segment.texts) == 1:
        raise Refused("bad text", f"segment {number}: texts must be a list of two or more texts")
    found = list(segment.texts) or [segment.text]
    for text in found:
        if not isinstance(text, str):
            raise Refused("bad text", f"segment {number}: {_short(text)} is not a text")
    if len(found) >= 2**15:
        raise Refused("too large", f"segment {number}: {len(found)} texts, at most {2**15 - 1}")
    return found


def check_region(segment: RegionSegment, number: int, width: int, height: int) -> list[list[float]]:
    """Check a region in an image of `width` x `height` pixels and return its points.

    The point of a turn is (degrees, 0).

    Raises:
        Refused: "bad region", or "too large" for more than 2**15 - 1 points.
    """

    def refuse(detail: str) -> Refused:
        return Refused("bad region", f"segment {number}: {detail}")

    if not isinstance(segment.label, str):
        raise refuse(f"label {_short(segment.label)} is not a text")
    if segment.shape not in SHAPES:
        raise refuse(f"shape {_short(segment.shape)}; known are {', '.join(SHAPES)}")
    if segment.shape == "turn":
        if segment.points or isinstance(segment.degrees, bool) or segment.degrees not in TURNS:
            raise refuse(
                f"a turn has no points, and degrees of 0, 90, 180 or 270, not {segment.degrees!r}"
            )
        return [[float(segment.degrees), 0.0]]
    if segment.degrees is not None:
        raise refuse(f"degrees belong to a turn, not to a {segment.shape}")
    points = _numbers(segment.points)
    if points is None:
        raise refuse(f"points {_short(segment.points)} are not a list of [x, y] numbers")
    count = len(points)
    wanted = {"point": "1 point", "box": "2 points", "polygon": "3 points or more"}[segment.shape]
    if (count != int(wanted[0]) and segment.shape != "polygon") or count < int(wanted[0]):
        raise refuse(f"a {segment.shape} has {wanted}, not {count}")
    if count >= 2**15:
        raise Refused("too large", f"segment {number}: {count} points, at most {2**15 - 1}")
    # The index stores float32, so the checks must hold for the rounded values.
    single = [[float(np.float32(n)) for n in point] for point in points]
    for x, y in single:
        if not (0 <= x <= width and 0 <= y <= height):
            raise refuse(f"({x:g}, {y:g}) lies outside the picture of {width} x {height} pixels")
    if segment.shape == "box" and not (single[0][0] < single[1][0] and single[0][1] < single[1][1]):
        raise refuse(f"a box is [[x1, y1], [x2, y2]] with x1 < x2 and y1 < y2, not {points}")
    return points


def _numbers(points: object) -> list[list[float]] | None:
    """Return the points as floats, or None unless all are pairs of finite numbers."""
    if isinstance(points, str) or not isinstance(points, Sequence):
        return None
    found = []
    for point in points:
        if isinstance(point, str) or not isinstance(point, Sequence) or len(point) != 2:
            return None
        if any(isinstance(n, bool) or not isinstance(n, int | float) for n in point):
            return None
        try:
            pair = [float(n) for n in point]
        except OverflowError:  # an integer beyond the float range
            return None
        if not all(map(math.isfinite, pair)):
            return None
        found.append(pair)
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
