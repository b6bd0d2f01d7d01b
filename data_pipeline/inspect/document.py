"""Checks one sample against the index: its document and each of its media files.

This is a second implementation of the format, independent of the ingest code, so that an error in
either shows as a difference. All functions are pure functions of bytes and index; `inspect.shard`
reads the bytes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_pipeline import decode
from data_pipeline.augment.regions import BOX, POINT, POLYGON, TURN
from data_pipeline.index.columns import GROUPS, PIECE_ITEM, PIECE_REGION, PIECE_TEXT, SourceIndex
from data_pipeline.inspect.problem import Fault
from data_pipeline.store.json_objects import UnsoundJson, parse_json
from data_pipeline.text import Tokenizer
from moonvit3d import media
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, video_chunks
from moonvit3d.media import MediaError

# Name of a shape -> its code in the index, and the allowed numbers of points.
SHAPES: dict[str, tuple[int, range]] = {
    "point": (POINT, range(1, 2)),
    "box": (BOX, range(2, 3)),
    "polygon": (POLYGON, range(3, 2**15)),
}
TURN_DEGREES = (0, 90, 180, 270)  # a turn has no points; the index keeps one, (degrees, 0)

_FILE = re.compile(r"(0|[1-9][0-9]*)\.([a-z0-9]+)")
# Suffix of a media file -> its kind and its expected format.
_SUFFIXES = {
    "png": (KIND_IMAGE, "PNG"),
    "jpg": (KIND_IMAGE, "JPEG"),
    "webp": (KIND_IMAGE, "WEBP"),
    "gif": (KIND_IMAGE, "GIF"),
    "mp4": (KIND_VIDEO, "MP4"),
}
_TOKEN_COLUMNS = ("piece_tokens", "variant_tokens")
# Item columns that the document does not determine: sizes and byte ranges of the media files.
_OF_FILES = ("frames", "height", "width", "offset", "length", "crc")


@dataclass(frozen=True)
class Described:
    """Contents of a sample's document.

    Attributes:
        columns: column of the index -> values of this sample; token columns only with a tokenizer.
        files: number of the media file -> its name, such as "0.png".
        timestamps: number of a video file -> the timestamp of each chunk.
    """

    columns: dict[str, list[Any]]
    files: dict[int, str] = field(default_factory=dict)
    timestamps: dict[int, list[str]] = field(default_factory=dict)


class _Malformed(Exception):
    """A document violates the format; the message says where."""


def describe(data: bytes, tokenizer: Tokenizer | None) -> Described | Fault:
    """Return the contents of a sample's document, or a fault if it cannot be read.

    `tokenizer` must be the index's tokenizer; with None, tokens are not counted.
    """
    try:
        document = parse_json(data, "document")
    except UnsoundJson as error:
        return Fault("document", str(error).removeprefix("document: "))
    try:
        _fields("the document", document, meta=dict, segments=list)
        return _Reader(tokenizer).read(document["segments"])
    except _Malformed as error:
        return Fault("document", str(error))


def document_faults(described: Described, index: SourceIndex, sample: int) -> list[Fault]:
    """Compare a document with the index; return one fault per column that differs."""
    faults = []
    for group, columns in GROUPS.items():
        pointer = getattr(index, f"{group}_ptr")
        part = slice(int(pointer[sample]), int(pointer[sample + 1]))
        for column, dtype in columns.items():
            if column not in described.columns:
                continue
            kind = "tokens" if column in _TOKEN_COLUMNS else "document"
            found = np.array(described.columns[column], np.float64).astype(dtype)
            if fault := _difference(column, found, getattr(index, column)[part]):
                faults.append(Fault(kind, fault))
                if "entries" in fault:
                    break  # the group's other columns have the same wrong length
    return faults


def _difference(column: str, found: np.ndarray, expected: np.ndarray) -> str | None:
    if len(found) != len(expected):
        return f"{column}: {len(found)} entries in the document, {len(expected)} in the index"
    # NaN is not a valid coordinate; it differs from everything and so is reported too.
    places = np.flatnonzero(found != expected)
    if not places.size:
        return None
    at = int(places[0])
    more = f" (and {places.size - 1} more)" if places.size > 1 else ""
    return f"{column}[{at}] is {found[at]} by the document, {expected[at]} in the index{more}"


class _Reader:
    """Reads the segments of one document and fills the columns of the index."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        names = [
            name
            for group in GROUPS.values()
            for name in group
            if not (name.startswith("item_") and name.removeprefix("item_") in _OF_FILES)
            and not (tokenizer is None and name in _TOKEN_COLUMNS)
        ]
        self._found = Described({name: [] for name in names})
        self._regions: list[tuple[str, int]] = []  # (where, number of its media file)

    def read(self, segments: Sequence[Any]) -> Described:
        """Read all segments of a document, in order."""
        kinds = {"text": self._text, "image": self._image, "video": self._video,
                 "region": self._region}  # fmt: skip
        for number, segment in enumerate(segments):
            where = f"segment {number}"
            _fields(where, segment, kind=str)
            if segment["kind"] not in kinds:
                raise _Malformed(f"{where}: unknown kind {segment['kind']!r}")
            kinds[segment["kind"]](where, segment)
        files = sorted(self._found.files)
        if files != list(range(len(files))):
            raise _Malformed(f"media files are numbered {files}, expected 0 ... {len(files) - 1}")
        # This comes last because a region may precede its image.
        self._put(region_item=[self._item_of(*region) for region in self._regions])
        return self._found

    def _text(self, where: str, segment: Mapping[str, Any]) -> None:
        _fields(where, segment, loss=bool)
        texts = [segment["text"]] if "text" in segment else segment.get("texts")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise _Malformed(f"{where}: expected 'text' (a string) or 'texts' (a list of strings)")
        if "text" in segment and "texts" in segment:
            raise _Malformed(f"{where}: has both 'text' and 'texts'")
        if "texts" in segment and len(texts) < 2:
            raise _Malformed(f"{where}: 'texts' has {len(texts)} variants, expected 2 or more")
        counts = [len(self._tokenizer.encode(text)) if self._tokenizer else 0 for text in texts]
        self._piece(PIECE_TEXT, counts[0], variants=len(texts))
        self._put(variant_tokens=counts[1:])

    def _image(self, where: str, segment: Mapping[str, Any]) -> None:
        number = self._file(where, segment, KIND_IMAGE)
        prefix = self._tokenizer.image_prefix() if self._tokenizer else ()
        self._piece(PIECE_ITEM, len(prefix))
        self._put(item_kind=[KIND_IMAGE], item_media=[number], item_chunk=[0])

    def _video(self, where: str, segment: Mapping[str, Any]) -> None:
        _fields(where, segment, timestamps=list)
        times = segment["timestamps"]
        if not times or not all(isinstance(time, str) for time in times):
            raise _Malformed(f"{where}: 'timestamps' must hold the time of each chunk")
        number = self._file(where, segment, KIND_VIDEO)
        self._found.timestamps[number] = times
        for chunk, time in enumerate(times):
            prefix = self._tokenizer.video_prefix(time) if self._tokenizer else ()
            self._piece(PIECE_ITEM, len(prefix))
            self._put(item_kind=[KIND_VIDEO], item_media=[number], item_chunk=[chunk])

    def _region(self, where: str, segment: Mapping[str, Any]) -> None:
        _fields(where, segment, media=int, shape=str, label=str, loss=bool)
        if segment["shape"] == "turn":
            if segment.get("degrees") not in TURN_DEGREES:
                raise _Malformed(f"{where}: degrees is {segment.get('degrees')!r}, not a quarter")
            code, points, numbers = TURN, [[segment["degrees"], 0]], 1
        else:
            code, points = _points(where, segment)
            numbers = 2 * len(points)
        length = self._tokenizer.region_length(segment["label"], numbers) if self._tokenizer else 0
        self._piece(PIECE_REGION, length)
        self._regions.append((where, segment["media"]))
        self._put(
            region_shape=[code],
            region_points=[len(points)],
            point_x=[x for x, _ in points],
            point_y=[y for _, y in points],
        )

    def _file(self, where: str, segment: Mapping[str, Any], kind: int) -> int:
        _fields(where, segment, file=str)
        name = segment["file"]
        match = _FILE.fullmatch(name)
        if not match or _SUFFIXES.get(match[2], (None,))[0] != kind:
            raise _Malformed(f"{where}: file {name!r} is no name for a {segment['kind']}")
        number = int(match[1])
        if number in self._found.files:
            raise _Malformed(f"{where}: file {number} belongs to an earlier segment")
        self._found.files[number] = name
        return number

    def _item_of(self, where: str, number: int) -> int:
        """Return the item number, within the sample, of an image file."""
        name = self._found.files.get(number)
        if name is None or number in self._found.timestamps:
            raise _Malformed(f"{where}: media is {number}, which is no image of this sample")
        return self._found.columns["item_media"].index(number)

    def _piece(self, kind: int, tokens: int, variants: int = 1) -> None:
        self._put(piece_kind=[kind], piece_tokens=[tokens], piece_variants=[variants])

    def _put(self, **values: Iterable[Any]) -> None:
        for column, more in values.items():
            if column in self._found.columns:
                self._found.columns[column] += more


def _points(where: str, segment: Mapping[str, Any]) -> tuple[int, list[list[float]]]:
    shape = segment["shape"]
    if shape not in SHAPES:
        raise _Malformed(f"{where}: unknown shape {shape!r}")
    _fields(where, segment, points=list)
    code, allowed = SHAPES[shape]
    points: list[Any] = segment["points"]
    pairs = all(
        isinstance(pair, list) and len(pair) == 2 and all(_is_number(value) for value in pair)
        for pair in points
    )
    if not pairs or len(points) not in allowed:
        raise _Malformed(f"{where}: {shape} with points {str(points)[:80]}")
    return code, points


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**53
    return isinstance(value, float)


def _fields(where: str, value: Any, **wanted: type) -> None:
    """Raise _Malformed unless `value` is an object with these fields of these types."""
    if not isinstance(value, dict):
        raise _Malformed(f"{where}: {type(value).__name__}, expected an object")
    for name, kind in wanted.items():
        found = value.get(name)
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise _Malformed(f"{where}: {name!r} is {found!r:.60}, expected {kind.__name__}")


def media_faults(
    data: bytes,
    index: SourceIndex,
    items: Sequence[int],
    suffix: str,
    timestamps: Sequence[str] | None,
    *,
    decode_all: bool,
) -> list[Fault]:
    """Compare a media file with its items in the index.

    Args:
        data: the whole file.
        index: index of the source.
        items: rows of this file in the item columns.
        suffix: suffix of the file's name in the shard.
        timestamps: timestamps of a video's chunks in the document; None if it could not be read.
        decode_all: True to decode every image and frame; otherwise only headers are read.
    """
    kind = int(index.item_kind[items[0]])
    try:
        found = (decode.verify if decode_all else media.probe)(data, kind)
    except MediaError as error:
        return [Fault("media", str(error))]
    faults = []
    expected_kind, expected_format = _SUFFIXES.get(suffix, (kind, found.format))
    if expected_kind != kind or expected_format != found.format:
        faults.append(f"a {found.format} file with the suffix {suffix!r}")
    for item in items:
        size = int(index.item_width[item]), int(index.item_height[item])
        if (found.width, found.height) != size:
            faults.append(
                f"{found.width} x {found.height} pixels, {size[0]} x {size[1]} in the index"
            )
            break
    faults += _frame_faults(found, index, items, timestamps)
    return [Fault("media", fault) for fault in faults]


def _frame_faults(
    found: media.Probe, index: SourceIndex, items: Sequence[int], timestamps: Sequence[str] | None
) -> Iterable[str]:
    frames = [int(index.item_frames[item]) for item in items]
    if int(index.item_kind[items[0]]) == KIND_IMAGE:
        if frames != [1]:
            yield f"an image with {frames} frames in the index"
        return
    chunks = video_chunks(found.frames, found.fps)
    if [len(chunk.frames) for chunk in chunks] != frames:
        yield (f"chunks of {[len(chunk.frames) for chunk in chunks]} frames, {frames} in the index")
    times = [chunk.timestamp for chunk in chunks]
    if timestamps is not None and times != list(timestamps):
        yield f"chunks at {times}, the document says {list(timestamps)}"
