"""Sample templates: the short form of a sample in a manifest, one per category.

`TEMPLATES[category]` expands a record into segments; docs/data_format.md shows them all. The rules:
images come first; the model's input (`system`, `prompt`, `question`, `task`, `observation`, all
turns except the assistant's) carries no loss, everything else does; a text or region directly after
another text or region starts on a new line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_pipeline.ingest.samples import (
    CrudeSample,
    ImageSegment,
    Refused,
    RegionSegment,
    Segment,
    TextSegment,
    VideoSegment,
)

# Returns the media file with this name or raises Refused.
Media = Callable[[str], ImageSegment | VideoSegment]

_SHAPES = ("point", "box", "polygon")
_ROLES = ("system", "user", "assistant", "tool")
_ALWAYS = ("key", "meta", "segments")


def expand_record(
    record: dict[str, Any], category: str, key: str, media: Media, *, strict: bool
) -> CrudeSample:
    """Build a sample from a record in short form, or with `segments`.

    Args:
        record: the JSON object.
        category: selects the template.
        key: key of the sample; with `strict`, a key in the record overrides it.
        media: reads the files that the record names.
        strict: refuse unknown fields; otherwise they are kept in `meta`.

    Raises:
        Refused: a field is unknown, missing or of the wrong type; or `media` raised it.
    """
    template = TEMPLATES[category]
    known = ("segments",) if "segments" in record else template.fields
    extra = {name: value for name, value in record.items() if name not in (*known, *_ALWAYS)}
    if strict and extra:
        raise Refused(
            "unknown field",
            f"{', '.join(map(repr, extra))}; known to {category} are "
            + ", ".join((*template.fields, *_ALWAYS)),
        )
    meta = _typed(record, "meta", dict, {})
    out = _SegmentWriter(media)
    if "segments" in record:
        out.segments = parse_segments(_typed(record, "segments", list), media)
    else:
        template.fill(out, record)
    found = _typed(record, "key", str, key) if strict else key
    return CrudeSample(found, out.segments, {**extra, **meta})


def parse_segments(described: Sequence[Any], media: Media) -> list[Segment]:
    """Parse the segments of a document, in the form used by shards and manifests."""
    found: list[Segment] = []
    for number, segment in enumerate(described):
        where = f"segment {number}"
        if not isinstance(segment, dict):
            raise Refused("bad segment", f"{where}: {segment!r:.60}, expected an object")
        kind = segment.get("kind")
        loss = _typed(segment, "loss", bool, True, where)
        if kind == "text":
            _only(segment, ("kind", "text", "texts", "loss"), where)
            texts = _typed(segment, "texts", list, (), where)
            text = _typed(segment, "text", str, "" if texts else _MISSING, where)
            found.append(TextSegment(text, loss, texts))
        elif kind in ("image", "video"):
            # Timestamps are computed from the file; given ones may be of another version.
            _only(segment, ("kind", "file", "timestamps"), where)
            file = media(_typed(segment, "file", str, where=where))
            if isinstance(file, ImageSegment) != (kind == "image"):
                raise Refused("unknown suffix", f"{where}: {segment['file']!r} is no {kind}")
            found.append(file)
        elif kind == "region":
            fields = ("kind", "media", "shape", "points", "degrees", "label", "loss")
            _only(segment, fields, where)
            found.append(
                RegionSegment(
                    shape=_typed(segment, "shape", str, where=where),
                    points=_typed(segment, "points", list, [], where),
                    label=_typed(segment, "label", str, "", where),
                    media=_typed(segment, "media", int, 0, where),
                    degrees=_typed(segment, "degrees", int | None, None, where),
                    loss=loss,
                )
            )
        else:
            raise Refused(
                "bad segment", f"{where}: kind is {kind!r}; known are text, image, video, region"
            )
    return found


class _SegmentWriter:
    """Collects the segments that a template writes, in order."""

    def __init__(self, media: Media) -> None:
        self.segments: list[Segment] = []
        self._media = media
        self.num_media = 0

    def _start(self) -> str:
        """Return a line break if the previous segment is a text or a region, else ""."""
        written = self.segments and isinstance(self.segments[-1], TextSegment | RegionSegment)
        return "\n" if written else ""

    def write(self, text: str, *, loss: bool = True, texts: Sequence[str] = ()) -> None:
        start = self._start()
        if len(texts) > 1:
            self.segments.append(TextSegment(loss=loss, texts=[start + text for text in texts]))
        else:
            self.segments.append(TextSegment(start + (texts[0] if texts else text), loss))

    def show(self, name: object, kind: type[ImageSegment | VideoSegment]) -> int:
        """Append a media file and return its number."""
        wanted = "image" if kind is ImageSegment else "video"
        if not isinstance(name, str):
            raise Refused("bad field", f"{wanted} is {name!r:.60}, expected a file name")
        file = self._media(name)
        if not isinstance(file, kind):
            raise Refused("unknown suffix", f"{name!r} is no {wanted}")
        self.segments.append(file)
        self.num_media += 1
        return self.num_media - 1

    def images(self, record: Mapping[str, Any], *, needed: bool) -> None:
        """Append `image` or `images`, each followed by the `turn` if the record has one."""
        names = _either(record, "image", str, "images", needed)
        degrees = _typed(record, "turn", int | None, None)
        for name in names:
            number = self.show(name, ImageSegment)
            if degrees is not None:
                label = self._start() + "turn"
                self.segments.append(RegionSegment("turn", (), label, number, degrees))

    def wording(self, record: Mapping[str, Any], *, needed: bool = True) -> None:
        """Append `text`, or the variants in `texts`."""
        texts = _either(record, "text", str, "texts", needed)
        if texts:
            self.write(texts[0], texts=texts)

    def question(self, record: Mapping[str, Any], *names: str) -> None:
        """Append these fields as texts without loss."""
        for name in names:
            if name in record:
                self.write(_typed(record, name, str), loss=False)

    def place(self, record: Mapping[str, Any], label: str, media: int, where: str) -> None:
        """Append the region of a record, whose field name is the shape."""
        [shape] = [shape for shape in _SHAPES if shape in record]
        points = _typed(record, shape, list, where=where)
        if shape == "point":
            points = [points]
        if shape == "box" and len(points) == 4:
            points = [points[:2], points[2:]]
        self.segments.append(RegionSegment(shape, points, self._start() + label, media))

    def places(self, record: Mapping[str, Any], field: str, label: str) -> None:
        """Append the regions of a list of objects."""
        for number, item in enumerate(_objects(record, field)):
            where = f"{field}[{number}]"
            _only(item, (label, *_SHAPES), where)
            if sum(shape in item for shape in _SHAPES) != 1:
                raise Refused("missing field", f"{where}: give one of {', '.join(_SHAPES)}")
            self.place(item, _typed(item, label, str, where=where), 0, where)


# The templates -----------------------------------------------------------------------------------


def _caption(out: _SegmentWriter, record: Mapping[str, Any]) -> None:
    out.images(record, needed=True)
    out.question(record, "prompt")
    out.wording(record)


def _video(out: _SegmentWriter, record: Mapping[str, Any]) -> None:
    out.show(_typed(record, "video", str), VideoSegment)
    out.question(record, "prompt")
    out.wording(record)


def _ocr(out: _SegmentWriter, record: Mapping[str, Any]) -> None:
    out.images(record, needed=True)
    out.question(record, "prompt")
    if "lines" not in record:
        out.wording(record)
        return
    if out.num_media != 1 or "text" in record or "texts" in record:
        raise Refused("bad field", "lines belong to one image, and stand instead of text")
    out.places(record, "lines", "text")


def _knowledge(out: _SegmentWriter, record: Mapping[str, Any]) -> None:
    out.images(record, needed=False)
    out.question(record, "prompt", "question")
    if ("question" in record) != ("answer" in record):
        raise Refused("missing field", "question and answer belong together")
    out.wording(record, needed="answer" not in record)
    if "answer" in record:
        out.write(_typed(record, "answer", str))


def _grounding(out: _SegmentWriter, record: Mapping[str, Any]) -> None:
    out.images({"image": _typed(record, "image", str)}, needed=True)
    out.question(record, "prompt")
    out.wording(record, needed="objects" not in record)
    out.places(record, "objects", "label")


def _interleaved(out: _SegmentWriter, record: Mapping[str, Any]) -> None:
    for number, part in enumerate(_typed(record, "content", list)):
        where = f"content[{number}]"
        # Texts stay unchanged, because the document has its own line breaks.
        if isinstance(part, str):
            out.segments.append(TextSegment(part))
            continue
        if not isinstance(part, dict):
            raise Refused("bad field", f"{where}: {part!r:.60}, expected a text or an object")
        if "image" in part or "video" in part:
            kind = "image" if "image" in part else "video"
            _only(part, (kind,), where)
            out.show(part[kind], ImageSegment if kind == "image" else VideoSegment)
            continue
        _only(part, ("text", "loss"), where)
        loss = _typed(part, "loss", bool, True, where)
        out.segments.append(TextSegment(_typed(part, "text", str, where=where), loss))


def _agent(out: _SegmentWriter, record: Mapping[str, Any]) -> None:
    out.question(record, "system", "task")
    if ("steps" in record) == ("turns" in record):
        raise Refused("missing field", "give either steps or turns")
    for number, step in enumerate(_objects(record, "steps")):
        _step(out, step, f"steps[{number}]")
    for number, turn in enumerate(_objects(record, "turns")):
        _turn(out, turn, f"turns[{number}]")
    if "answer" in record:
        out.write(_typed(record, "answer", str))


def _step(out: _SegmentWriter, step: Mapping[str, Any], where: str) -> None:
    """Write the screenshot, observation, thought, and the action with its region."""
    _only(step, ("image", "observation", "thought", "action", *_SHAPES), where)
    seen = out.show(step["image"], ImageSegment) if "image" in step else None
    out.question(step, "observation")
    if "thought" in step:
        out.write(_typed(step, "thought", str, where=where))
    action = _typed(step, "action", str, where=where)
    shapes = sum(shape in step for shape in _SHAPES)
    if not shapes:
        out.write(action)
    elif shapes > 1 or seen is None:
        raise Refused("bad field", f"{where}: an action has one place, in the step's own image")
    else:
        out.place(step, action, seen, where)


def _turn(out: _SegmentWriter, turn: Mapping[str, Any], where: str) -> None:
    _only(turn, ("role", "image", "images", "text"), where)
    role = _typed(turn, "role", str, where=where)
    if role not in _ROLES:
        raise Refused("bad field", f"{where}: role {role!r}; known are {', '.join(_ROLES)}")
    out.images(turn, needed=False)
    if "text" in turn:
        out.write(_typed(turn, "text", str, where=where), loss=role == "assistant")


def _text(out: _SegmentWriter, record: Mapping[str, Any]) -> None:
    out.wording(record)


@dataclass(frozen=True)
class SampleTemplate:
    """The fields of a category's short form and the function that writes their segments."""

    fields: tuple[str, ...]
    fill: Callable[[_SegmentWriter, Mapping[str, Any]], None]


TEMPLATES = {
    "agent": SampleTemplate(("system", "task", "steps", "turns", "answer"), _agent),
    "caption": SampleTemplate(("image", "images", "turn", "prompt", "text", "texts"), _caption),
    "code": SampleTemplate(("text", "texts"), _text),
    "grounding": SampleTemplate(("image", "prompt", "text", "texts", "objects"), _grounding),
    "interleaved": SampleTemplate(("content",), _interleaved),
    "knowledge": SampleTemplate(
        ("image", "images", "turn", "prompt", "question", "answer", "text", "texts"), _knowledge
    ),
    "ocr": SampleTemplate(("image", "images", "turn", "prompt", "text", "texts", "lines"), _ocr),
    "text": SampleTemplate(("text", "texts"), _text),
    "video": SampleTemplate(("video", "prompt", "text", "texts"), _video),
}


# Fields ------------------------------------------------------------------------------------------

_MISSING: Any = object()


def _typed(
    record: Mapping[str, Any], name: str, kind: Any, default: Any = _MISSING, where: str = ""
) -> Any:
    """Return a field after checking its type; `default` if the field is missing."""
    prefix = f"{where}: " if where else ""
    if name not in record:
        if default is _MISSING:
            raise Refused("missing field", f"{prefix}{name!r} is needed")
        return default
    value = record[name]
    # True is an int in Python, but is not a valid number here.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = getattr(kind, "__name__", "int")
        raise Refused("bad field", f"{prefix}{name} is {value!r:.60}, expected {_WORDS[wanted]}")
    return value


_WORDS = {
    "str": "a text",
    "list": "a list",
    "dict": "an object",
    "bool": "true or false",
    "int": "a whole number",
}


def _either(record: Mapping[str, Any], one: str, kind: type, many: str, needed: bool) -> list[Any]:
    """Return the value of `one` as a list, or the list of `many`."""
    if one in record and many in record:
        raise Refused("bad field", f"give {one} or {many}, not both")
    found = [_typed(record, one, kind)] if one in record else _typed(record, many, list, [])
    for value in found:
        if not isinstance(value, kind):
            raise Refused("bad field", f"{many} holds {value!r:.60}, expected texts")
    if needed and not found:
        raise Refused("missing field", f"{one!r} or {many!r} is needed")
    return found


def _objects(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list of objects, [] if the field is missing."""
    found = _typed(record, name, list, [])
    for number, item in enumerate(found):
        if not isinstance(item, dict):
            raise Refused("bad field", f"{name}[{number}] is {item!r:.60}, expected an object")
    return found


def _only(record: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if extra := [name for name in record if name not in known]:
        raise Refused(
            "unknown field", f"{where}: {', '.join(map(repr, extra))}; known are {', '.join(known)}"
        )
