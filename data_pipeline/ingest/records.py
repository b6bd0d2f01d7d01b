"""Unread samples, as readers yield them: a group of files with one key, or a manifest line.

All are small and picklable; `load` reads the files, in the process that calls it.
"""

import hashlib
import mimetypes
import os
import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from data_pipeline.index.shards import MAX_KEY, check_sample_key
from data_pipeline.ingest.byte_sources import ByteSource, in_store, points_outside
from data_pipeline.ingest.prepare import SUFFIXES
from data_pipeline.ingest.sample_templates import TEMPLATES, expand_record
from data_pipeline.ingest.samples import (
    CrudeSample,
    ImageSegment,
    IngestPolicy,
    Refused,
    VideoSegment,
)
from data_pipeline.store.json_objects import UnsoundJson, parse_json
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO

# Suffixes of plain-text files: captions of media, and samples of the categories text and code.
CAPTIONS = ("txt", "caption")
_PLAIN = """
txt text md markdown rst tex org adoc
py pyi c h cc cpp cxx hh hpp cu cuh m mm go rs java kt scala groovy swift js mjs cjs ts jsx tsx vue
html css scss sh bash zsh fish ps1 bat pl pm rb php lua r jl hs ml mli ex exs erl clj lisp el scm
f f90 f95 for pas asm s sql graphql proto cmake mk gradle toml yaml yml ini cfg xml dockerfile tf
nix zig d dart vhd vhdl v sv
"""
PLAIN = frozenset(_PLAIN.split())
_MEDIA_FIELDS = ("image", "images", "video", "content", "steps", "turns")
_KNOWN = ", ".join(suffix for kind in SUFFIXES.values() for suffix in kind)
_TYPES = mimetypes.MimeTypes()  # Python's built-in table; the machine's table may differ
_SORT = (
    "if its other files lie elsewhere in the tar, make it anew with `tar --sort=name`: those of a "
    "sample must be neighbours"
)
_NUMBERED = re.compile(r"(?:(\d+)\.)?(\w+)")  # "png", "0.png"; not "mask.png"


def safe_key(name: str) -> str:
    """Return a sample key for any file name, unique per name.

    Names that are valid keys stay as they are; for all other names the key ends with a hash of the
    name.
    """
    try:
        check_sample_key(name)
    except ValueError:
        try:
            data = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # a lone surrogate, which JSON can hold
            data = name.encode("utf-8", "surrogatepass")
        mark = hashlib.sha256(data).hexdigest()[:10]
        plain = re.sub("/+", "/", re.sub(r"[^A-Za-z0-9_\-/]", "_", name)).strip("/")
        return f"{plain[: MAX_KEY - 11]}-{mark}"
    return name


def numbered_key(name: str, number: int) -> str:
    """Return a sample key for a file name and a number, unique per pair."""
    key = f"{safe_key(name)}-{number:08d}"
    return key if len(key) <= MAX_KEY else safe_key(f"{name}-{number:08d}")


def suffix_of(name: str) -> str:
    """Return the suffix of a file name after its last dot, in lower case; "" without a dot."""
    return PurePosixPath(f"x{name}" if name.startswith(".") else name).suffix[1:].lower()


def is_medium(name: str) -> bool:
    """Return whether the suffix is that of a supported image or video format."""
    return any(suffix_of(f".{name}") in known for known in SUFFIXES.values())


def _segment(name: str, source: ByteSource, policy: IngestPolicy) -> ImageSegment | VideoSegment:
    suffix = suffix_of(f".{name}")
    for kind, segment in ((KIND_IMAGE, ImageSegment), (KIND_VIDEO, VideoSegment)):
        if suffix in SUFFIXES[kind]:
            data = b"" if policy.texts_only else source.read(policy.max_media_bytes)
            return segment(data, suffix)
    raise Refused("unknown suffix", f"{name!r}; known are {_KNOWN}")


def _shown(name: str) -> bool:
    """Return whether a suffix belongs to any image or video format, such as "bmp"."""
    kind, _ = _TYPES.guess_type(f"x.{name}")
    return kind is not None and kind.startswith(("image/", "video/"))


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused("not UTF-8", f"{name}: {error}") from None


def _parsed(data: bytes, name: str) -> Any:
    try:
        return parse_json(_decoded(data, name), name)
    except UnsoundJson as error:
        raise Refused("unreadable", str(error)) from None


@dataclass(frozen=True)
class Broken:
    """Placeholder for input that could not be split into samples; `load` reports the reason."""

    key: str
    reason: str
    detail: str
    size: int = 0

    def load(self, policy: IngestPolicy) -> CrudeSample:
        """Raise Refused with the reason."""
        raise Refused(self.reason, self.detail)


@dataclass(frozen=True)
class Group:
    """Files of one key.

    Attributes:
        stem: common beginning of all file names, up to a dot.
        members: rest of each file's name, such as "jpg", "0.png" or "json" -> its bytes.
        category: selects the short form of the JSON member.
        in_tar: True if the files are neighbours in a tar; more files of the same stem may then be
            elsewhere in it.
    """

    key: str
    stem: str
    members: dict[str, ByteSource]
    category: str
    in_tar: bool = False

    @property
    def size(self) -> int:
        """See `Pending.size`."""
        return sum(source.size for source in self.members.values())

    def load(self, policy: IngestPolicy) -> CrudeSample:
        """See `Pending.load`."""

        def media(name: str) -> ImageSegment | VideoSegment:
            member = name.rsplit("/", 1)[-1].removeprefix(f"{self.stem}.")
            if member not in self.members:
                there = ", ".join(self.members)
                raise Refused("missing file", f"{name!r} is none of {self.stem}.[{there}]")
            return _segment(member, self.members[member], policy)

        record = self._record(policy)
        if "segments" not in record:
            self._add_text(record, policy)
            self._add_media(record)
        try:
            return expand_record(record, self.category, self.key, media, strict=False)
        except Refused as error:
            more = self._no_medium() if self._foreign else _SORT if self.in_tar else ""
            if error.args[0] == "missing field" and more:
                raise Refused(*error.args[:-1], f"{error.args[-1]}; {more}") from None
            raise

    @property
    def _foreign(self) -> list[str]:
        """Members that are neither supported media files nor texts."""
        known = (*CAPTIONS, *(PLAIN if self.category in ("text", "code") else ()), "json")
        return [m for m in self.members if not is_medium(m) and suffix_of(f".{m}") not in known]

    def _no_medium(self) -> str:
        return f"{self.stem}.[{', '.join(self._foreign)}] is no medium; known are {_KNOWN}"

    def _record(self, policy: IngestPolicy) -> dict[str, Any]:
        """Return the JSON member as a record; a bare string or list becomes its captions."""
        if "json" not in self.members:
            return {}
        name = f"{self.stem}.json"
        found = _parsed(self.members["json"].read(policy.max_document_bytes), name)
        if isinstance(found, str):
            return {"text": found}
        if isinstance(found, list):
            return {"texts": found}
        if not isinstance(found, dict):
            raise Refused("bad field", f"{name}: {found!r:.60}, expected an object")
        return found

    def _add_text(self, record: dict[str, Any], policy: IngestPolicy) -> None:
        """Set `text` from the text file; it overrides a text in the JSON, which moves to `meta`."""
        plain = self.category in ("text", "code")
        texts = [m for m in self.members if suffix_of(f".{m}") in (PLAIN if plain else CAPTIONS)]
        if not texts:
            told = {"text", "texts"} & set(record)
            if "caption" in record and "text" in TEMPLATES[self.category].fields and not told:
                caption = record.pop("caption")
                record["texts" if isinstance(caption, list) else "text"] = caption
            return
        if len(texts) > 1:
            raise Refused("bad field", f"{self.stem} has several texts: {', '.join(texts)}")
        text = _decoded(self.members[texts[0]].read(policy.max_document_bytes), texts[0])
        other = {name: record.pop(name) for name in ("text", "texts") if name in record}
        if other:
            meta = record.get("meta", {})
            if not isinstance(meta, dict):
                raise Refused("bad field", f"meta is {meta!r:.60}, expected an object")
            record["meta"] = {**other, **meta}
        record["text"] = text if plain else text.strip()

    def _add_media(self, record: dict[str, Any]) -> None:
        """Add the media files to the record by their names, unless the record names them."""
        if any(name in record for name in _MEDIA_FIELDS):
            return
        found = [(_NUMBERED.fullmatch(m), m) for m in self.members if is_medium(m)]
        ordered = sorted((int(match[1] or -1), m) for match, m in found if match)
        names = [name for _, name in ordered]
        if not names:
            if self._foreign and (not record or any(map(_shown, self._foreign))):
                raise Refused("unknown suffix", self._no_medium())
            return
        fields = TEMPLATES[self.category].fields
        if len(names) == 1:
            field = "image" if suffix_of(f".{names[0]}") in SUFFIXES[KIND_IMAGE] else "video"
            value: Any = names[0]
        else:
            field, value = "images", names
        if field not in fields:
            raise Refused(
                "bad field",
                f"{self.stem}.[{', '.join(names)}]: {self.category} takes no {field} like this; "
                f"say in {self.stem}.json what belongs where",
            )
        record[field] = value


@dataclass(frozen=True)
class Line:
    """A line of a JSONL manifest.

    Attributes:
        place: file and line, for messages.
        default: key of the sample if the line has none.
        base: folder or URI to which its media paths are relative.
        prefix: prepended to the key of the line.
        follow_links: True if links may lead out of `base`.
    """

    place: str
    default: str
    data: bytes
    base: str
    category: str
    prefix: str
    follow_links: bool

    @property
    def key(self) -> str:
        """File and line, as the key is unknown until the line is parsed."""
        return self.place

    @property
    def size(self) -> int:
        """See `Pending.size`; the media are estimated at 256 KiB."""
        return len(self.data) + (1 << 18)

    def load(self, policy: IngestPolicy) -> CrudeSample:
        """See `Pending.load`."""

        def media(name: str) -> ImageSegment | VideoSegment:
            return _segment(name, ByteSource(self._inside(name)), policy)

        if len(self.data) > policy.max_document_bytes:
            raise Refused("too large", f"{self.place}: more than {policy.max_document_bytes} bytes")
        record = _parsed(self.data, self.place)
        if not isinstance(record, dict):
            raise Refused("bad field", f"{self.place}: {record!r:.60}, expected an object")
        sample = expand_record(record, self.category, self.default, media, strict=True)
        if self.prefix and "key" in record:
            return replace(sample, key=safe_key(f"{self.prefix}/{sample.key}"))
        return sample

    def _inside(self, name: str) -> str:
        """Return the path or URI of a file that the line names; refuse paths outside `base`."""
        if in_store(name):
            return name
        try:
            os.fsencode(name)
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON can hold
            raise Refused("bad path", f"{name!r:.100}: {error.reason}") from None
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise Refused(
                "bad path",
                f"{name!r}; name files relative to the manifest, below its folder, or by s3:// "
                "URIs",
            )
        # In a bucket "./" would be part of the key.
        path = "/".join([self.base, *(part for part in name.split("/") if part != ".")])
        if not (self.follow_links or in_store(self.base)) and points_outside(path, self.base):
            raise Refused("bad path", f"{name!r}: a link leads out of {self.base}")
        return path
