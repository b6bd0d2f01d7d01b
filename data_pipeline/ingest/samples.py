"""What a source is handed: samples as lists of segments, and the rules that they must keep.

A sample is a key, segments in reading order and free `meta`. The same segments, as JSON, are the
sample's document in its shard (docs/data_format.md shows them). Positions of regions are pixels of
the file as stored, in edge coordinates: the picture's top left corner is (0, 0), its bottom right
corner (width, height).
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
    """Text; with `loss` false the model reads it but is not trained to write it.

    `texts`, in place of `text`: two or more wordings of the same thing; each time the sample is
    drawn, one is chosen.
    """

    text: str = ""
    loss: bool = True
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class ImageSegment:
    """An image file as it is; suffix "png", "jpg", "webp" or "gif" (static)."""

    data: bytes
    suffix: str


@dataclass(frozen=True)
class VideoSegment:
    """An MP4 file as it is; suffix "mp4"."""

    data: bytes
    suffix: str = "mp4"


@dataclass(frozen=True)
class RegionSegment:
    """A place in an image, written as its label and its coordinates.

    Args:
        shape: "point", "box", "polygon", or "turn" for the orientation of a whole image.
        points: [[x, y], ...] in pixels: one for a point, [[x1, y1], [x2, y2]] for a box, three or
            more for a polygon, none for a turn.
        label: what stands before the coordinates, a space or a line break included.
        media: which media file of the sample, counted from 0; it must be an image, and may come
            before or after.
        degrees: of a turn: by how much the content is turned clockwise; 0, 90, 180 or 270.
        loss: whether the model learns to write it.
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
    """What a source hands in. `meta` is free JSON kept beside the segments.

    `meta` of {"flip": false} forbids mirroring the images of this sample.
    """

    key: str
    segments: Sequence[Segment]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of its media."""
        media = (s for s in self.segments if isinstance(s, ImageSegment | VideoSegment))
        return sum(len(segment.data) for segment in media)


class Pending(Protocol):
    """A sample that is still to be read. Small, and picklable: another process reads it."""

    @property
    def key(self) -> str:
        """Names it in messages until it is read."""
        ...

    @property
    def size(self) -> int:
        """About how many bytes it is, to spread the work evenly."""
        ...

    def load(self, policy: "IngestPolicy") -> CrudeSample:
        """Read it, or raise Refused; what is too large by the policy need not be read."""
        ...


@runtime_checkable
class Reader(Protocol):
    """An input of ingest that can be read from any place in it.

    Attributes:
        identity: JSON that tells this input from another; with None an ingest cannot be resumed.
        total: how many samples there are, or None.
    """

    identity: dict[str, Any] | None
    total: int | None

    def read(self, cursor: Any = None) -> Iterator[tuple[Any, CrudeSample | Pending]]:
        """Samples in order, each with the cursor (JSON) at which reading begins with it again."""
        ...


class Listed:
    """Samples of any iterable as a Reader.

    Args:
        samples: read once, in order.
        identity: JSON that changes whenever the samples do; with it an ingest can be resumed,
            by passing over the samples that are done.
        total: how many there are, if that is known.
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
    """What is too large to be worth training on.

    Args:
        max_text_tokens: tokens of a sample's texts and regions, below 2**31.
        max_items: images and video chunks of a sample, below 2**15.
        max_media_bytes: bytes of one media file.
        max_document_bytes: bytes of a text or JSON file, of a line of a manifest, and of the
            document that is written. JSON takes thirty times as much memory once it is parsed.
        max_meta_bytes: bytes of `meta` as JSON; it is parsed again at each draw.
        max_video_pixels: frames of a video, times the pixels of one.
        max_video_seconds: to decode the videos of a sample.
        texts_only: media files are not read, and segments of them hold no bytes.
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
    """A sample that was left out: a short reason to count by, and the detail."""

    key: str
    reason: str
    detail: str


class Refused(Exception):
    """Carries (reason, detail) of a sample that cannot be used."""


def check_text(segment: TextSegment, number: int) -> list[str]:
    """The wordings of a text segment: one, or two and more.

    Raises:
        Refused: a wording is not a string, both `text` and `texts` are given, or `texts` has one.
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
    """The points of a region in an image of `width` x `height` pixels; a turn has (degrees, 0).

    Raises:
        Refused: "bad region" with what is wrong.
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
    # The index holds them in single precision; what is right only in double would be wrong there.
    single = [[float(np.float32(n)) for n in point] for point in points]
    for x, y in single:
        if not (0 <= x <= width and 0 <= y <= height):
            raise refuse(f"({x:g}, {y:g}) lies outside the picture of {width} x {height} pixels")
    if segment.shape == "box" and not (single[0][0] < single[1][0] and single[0][1] < single[1][1]):
        raise refuse(f"a box is [[x1, y1], [x2, y2]] with x1 < x2 and y1 < y2, not {points}")
    return points


def _numbers(points: object) -> list[list[float]] | None:
    """Points as floats, or None if they are anything but pairs of finite numbers."""
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
        except OverflowError:  # a whole number of 400 digits
            return None
        if not all(map(math.isfinite, pair)):
            return None
        found.append(pair)
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
