"""Readers of raw data: folders, webdataset tars and JSONL manifests, local or in a store.

A reader only lists the samples; the process that prepares a sample reads its files. Files are
grouped into samples by name. In a tar the rule is webdataset's: the key is the file name up to its
first dot, and the rest names the member. In a folder the key is the name without its suffix,
because file names may contain dots; `NAME.0.png` and `NAME.1.png` belong to `NAME.json` if that
exists.
"""

import gzip
import hashlib
import os
import re
import stat
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import PurePosixPath
from typing import IO, Any, TypeVar

from data_pipeline.ingest.byte_sources import (
    INPUT_ERRNOS,
    MAX_LOADED,
    ByteSource,
    RefusedSource,
    in_store,
    open_input,
    points_outside,
    store_of,
)
from data_pipeline.ingest.input_labels import labels
from data_pipeline.ingest.records import Broken, Group, Line, is_medium, numbered_key, safe_key
from data_pipeline.ingest.sample_templates import TEMPLATES
from data_pipeline.ingest.samples import IngestPolicy, Pending
from data_pipeline.ingest.tars import Members, archives, content
from data_pipeline.store.addresses import split_place
from data_pipeline.store.open import MissingKey

_TARS = (".tar", ".tar.gz", ".tgz")
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
RAW_FILES = _TARS + _LINES
# Files that a source of this project has next to its shards.
_OURS = (
    *("manifest.json", "index.parquet", "provenance.json", "rejected.jsonl"),
    *("erased.json", "holds.json"),
)
_LONGEST_LINE = 64 << 20
# Tar members in a store are read with the tar up to this size, larger ones by separate requests.
_HELD = 8 << 20
# Limit of files per sample; the index stores media numbers in 16 bits.
_MOST_MEMBERS = 1 << 16
AnyFile = TypeVar("AnyFile")
# Exceptions of reading a damaged file.
_DAMAGED = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError)

# webdataset's rule: the path up to the first dot of the file name, and the rest.
_MEMBER = re.compile(r"((?:.*/)?[^./][^.]*)\.([^/]+)")


@dataclass(frozen=True)
class Choices:
    """Options of all inputs; see `open_inputs`."""

    category: str
    prefix_keys: bool = False
    follow_links: bool = False
    policy: IngestPolicy = IngestPolicy()


def open_inputs(
    inputs: Sequence[str],
    category: str,
    *,
    prefix_keys: bool = False,
    follow_links: bool = False,
    policy: IngestPolicy | None = None,
) -> "Inputs":
    """Open folders, tars and manifests as one reader, in the given order.

    Args:
        inputs: paths, or URIs such as s3://bucket/prefix: a folder of samples or of tars, a file
            ending in .tar, .tar.gz, .tgz, or in .jsonl, .ndjson (and .gz).
        category: selects the short form of manifests and JSON members.
        prefix_keys: prepend the name of the input (see `input_labels`) to each key; needed if
            inputs share keys.
        follow_links: allow links that lead out of a folder. In an untrusted folder, a link could
            make any file of this machine part of the data.
        policy: sizes above which a packed file is not unpacked.

    Raises:
        ValueError: an input is missing, empty, of no known kind, or given twice; or a link leads
            out of it.
    """
    if category not in TEMPLATES:
        raise ValueError(f"category is {category!r}; known are {', '.join(TEMPLATES)}")
    if not inputs:
        raise ValueError("no input: give a folder, a .tar or a .jsonl file")
    choices = Choices(category, prefix_keys, follow_links, policy or IngestPolicy())
    return Inputs([reader for where in inputs for reader in _open(where, choices)], choices)


def _open(where: str, choices: Choices) -> list["Folder | Tar | Lines"]:
    split_place("input", where)  # refuses a misspelt store URI
    name = where.removeprefix("file://").rstrip("/") or "/"
    try:
        if name.endswith(_TARS):
            return [Tar(name, choices)]
        if name.endswith(_LINES):
            return [Lines(name, choices)]
    except (FileNotFoundError, MissingKey):
        raise ValueError(f"input {where}: there is no such file") from None
    except OSError as error:
        if error.strerror is None or error.errno not in INPUT_ERRNOS:
            raise
        raise ValueError(f"input {where}: {error.strerror}") from None
    if not in_store(name) and not os.path.isdir(name):
        what = "no such file or folder" if not os.path.exists(name) else "no input that is known"
        raise ValueError(f"input {where}: {what}; give a folder, a .tar or a .jsonl file")
    folder = Folder(name, choices)
    manifests = [f for f in folder.files if f.endswith(_LINES) and "/" not in f and f not in _OURS]
    if manifests and choices.category != "code":  # in code they may be project files
        raise ValueError(
            f"input {where}: holds the manifest {manifests[0]}, which says what the samples are; "
            f"give the manifest itself: {name}/{manifests[0]}"
        )
    tars = [file for file in folder.files if file.endswith(_TARS)]
    if not tars:
        return [folder]
    if others := [f for f in folder.files if not f.endswith(_TARS) and f not in _OURS]:
        raise ValueError(
            f"input {where}: holds tars and other files ({others[0]}); give them as two inputs"
        )
    return [Tar(f"{name}/{file}", choices) for file in tars]


class Inputs:
    """Concatenation of readers; see `data_pipeline.ingest.samples.Reader`."""

    def __init__(self, readers: Sequence["Folder | Tar | Lines"], choices: Choices) -> None:
        self._readers = readers
        names = labels([reader.where for reader in readers], RAW_FILES)
        for reader, name in zip(readers, names, strict=True):
            reader.label = name
        self.identity: dict[str, Any] | None = {
            "files": [reader.identity for reader in readers],
            "labels": names,
            "prefix_keys": choices.prefix_keys,
        }
        totals = [reader.total for reader in readers]
        self.total = None if None in totals else sum(t for t in totals if t)

    def read(self, cursor: Any = None) -> Iterator[tuple[Any, Pending]]:
        """See `Reader.read`."""
        first, inner = cursor or (0, None)
        for number in range(first, len(self._readers)):
            for at, found in self._readers[number].read(inner):
                yield [number, at], found
            inner = None


# Folders -----------------------------------------------------------------------------------------


class Folder:
    """Reads the files below a folder or prefix; a cursor is the number of preceding samples."""

    def __init__(self, where: str, choices: Choices) -> None:
        self.where, self.label, self._choices = where, _name(where), choices
        digest = hashlib.sha256()
        self.files: list[str] = []
        for name, version in _files(where, choices.follow_links):
            self.files.append(name)
            digest.update(f"{name}\0{version}\n".encode("utf-8", "surrogateescape"))
        if not self.files:
            raise ValueError(f"input {where}: there are no files in it")
        self.identity = {"folder": _name(where), "sha256": digest.hexdigest()}
        sizes = [len(members) for _, members in self._groups()]
        assert sum(sizes) == len(self.files), f"{where}: a file is in no sample"
        self.total: int | None = len(sizes)

    def _groups(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield (stem with its folder, {member: file}) in order."""
        split = self._choices.category in ("text", "code")
        for folder, files in groupby(self.files, lambda name: name.rpartition("/")[0]):
            yield from _grouped(folder, [name.rpartition("/")[2] for name in files], split)

    def read(self, cursor: Any = None) -> Iterator[tuple[Any, Pending]]:
        """See `Reader.read`."""
        start = cursor or 0
        for number, (stem, members) in enumerate(islice(self._groups(), start, None), start):
            key = f"{self.label}/{stem}" if self._choices.prefix_keys else stem
            files = {
                member: ByteSource(f"{self.where}/{file}")
                for member, file in sorted(members.items())
            }
            name = stem.rpartition("/")[2]
            yield number, Group(safe_key(key), name, files, self._choices.category)


def _grouped(
    folder: str, names: Sequence[str], split: bool
) -> Iterator[tuple[str, dict[str, str]]]:
    """Group the files of one folder by stem, sorted."""
    documents = {name[: -len(".json")] for name in names if name.endswith(".json")}
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        stem, suffix = os.path.splitext(name)
        owner, number = os.path.splitext(stem)
        member = suffix[1:]
        if number[1:].isdigit() and owner in documents and stem not in documents:
            stem, member = owner, f"{number[1:]}{suffix}"
        groups.setdefault(stem, {})[member] = name
    base = f"{folder}/" if folder else ""
    for stem, given in sorted(groups.items()):
        members = _lowered(given)
        if split and "json" not in members:
            # Each text or program file is a sample: a.c and a.h are two samples.
            for member, name in sorted(members.items()):
                key = stem if member == "txt" and "" not in members else name
                yield base + key, {member: base + name}
        else:
            yield base + stem, {member: base + name for member, name in members.items()}


def _lowered(members: dict[str, AnyFile]) -> dict[str, AnyFile]:
    """Return members with names in lower case, except names that differ only in case."""
    count = Counter(member.lower() for member in members)
    return {m.lower() if count[m.lower()] == 1 else m: file for m, file in members.items()}


def _files(where: str, follow_links: bool) -> Iterator[tuple[str, str]]:
    """Yield (name below `where`, version) of every file that is not hidden, folder by folder."""
    if not in_store(where):
        yield from _walk(where, "", (), follow_links)
        return
    store, prefix = store_of(f"{where}/")
    names = [name[len(prefix) :] for name in store.list(prefix)]
    for name in sorted(names, key=lambda name: name.rpartition("/")[::2]):
        if not any(part.startswith(".") for part in name.split("/")):
            yield name, ""


def _walk(
    root: str, folder: str, above: tuple[str, ...], follow_links: bool
) -> Iterator[tuple[str, str]]:
    place = os.path.join(root, folder)
    real = os.path.realpath(place)
    if real in above:
        raise ValueError(f"input {place}: a link leads back to {real}; remove it")
    try:
        entries = sorted(os.scandir(place), key=lambda entry: entry.name)
    except PermissionError:
        raise ValueError(f"input {place}: the folder may not be read") from None
    folders = []
    for entry in entries:
        if entry.name.startswith("."):
            continue
        name = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_symlink() and not follow_links and points_outside(entry.path, root):
            raise ValueError(
                f"input {entry.path}: a link leads out of the folder, to "
                f"{os.path.realpath(entry.path)}; remove it, or add --follow-links if all links in "
                "this folder are yours"
            )
        try:
            status = entry.stat()
        except OSError:
            status = None  # a dangling or circular link; reading it later reports the reason
        if status is not None and stat.S_ISDIR(status.st_mode):
            folders.append(name)
        elif status is not None and stat.S_ISREG(status.st_mode):
            yield name, f"{status.st_size} {status.st_mtime_ns}"
        else:
            yield name, "gone"
    for name in folders:
        yield from _walk(root, name, (*above, real), follow_links)


def _name(where: str) -> str:
    """Return the last part of a path or URI; identities use it so that data may be moved."""
    return PurePosixPath(os.path.abspath(where) if not in_store(where) else where).name


# Tars --------------------------------------------------------------------------------------------


class Tar:
    """Reads a tar by webdataset's rule; a cursor is the offset of a sample's first header."""

    def __init__(self, where: str, choices: Choices) -> None:
        self.where, self.label, self._choices = where, _name(where), choices
        with open_input(where) as found:
            self.identity = {"tar": _name(where), **found.version}
        self.total: int | None = None
        packed = not where.endswith(".tar")
        self._by_range = not packed
        self._split = choices.category in ("text", "code")
        self._local = not packed and not in_store(where)

    def read(self, cursor: Any = None) -> Iterator[tuple[Any, Pending]]:
        """See `Reader.read`."""
        at = cursor or 0
        try:
            with open_input(self.where) as found:
                found.file.seek(at)
                for tar in archives(found.file):
                    for at, stem, members in _by_key(self._shown(tar), self._split, self._source):
                        yield at, self._group(stem, members)
        except _DAMAGED as error:
            yield at, Broken(_name(self.where), "damaged file", f"{self.where}: {error}")

    @staticmethod
    def _shown(members: Members) -> Members:
        """Return the members that are not hidden."""
        return (found for found in members if not re.search(r"(?:^|/)\.(?!/)", found[1].name))

    def _source(self, tar: tarfile.TarFile, info: tarfile.TarInfo, room: int) -> ByteSource:
        """Return the bytes of a member, read now only if they cannot be read by range later.

        A member read now must fit the policy and `room`.
        """
        name, policy = info.name, self._choices.policy
        if not info.isreg():
            told = f"{self.where}: {name} is a link or device, which is not followed in a tar"
            return RefusedSource(self.where, length=0, reason="missing file", detail=told)
        if self._by_range and not info.issparse() and (self._local or info.size > _HELD):
            return ByteSource(self.where, info.offset_data, info.size)
        most = policy.max_media_bytes if is_medium(name) else policy.max_document_bytes
        if not 0 <= info.size <= min(most, room):
            told = f"{self.where}: {name}: {info.size} bytes, at most {min(most, room)}"
            return RefusedSource(self.where, length=0, reason="too large", detail=told)
        return ByteSource(self.where, data=content(tar, info))

    def _group(self, stem: str, members: dict[str, ByteSource]) -> Group:
        prefix = f"{self.label}/" if self._choices.prefix_keys else ""
        name = stem.rpartition("/")[2]
        key = safe_key(prefix + stem)
        return Group(key, name, members, self._choices.category, in_tar=True)


def _by_key(
    members: Members,
    split: bool,
    source_of: Callable[[tarfile.TarFile, tarfile.TarInfo, int], ByteSource],
) -> Iterator[tuple[int, str, dict[str, ByteSource]]]:
    """Group neighbouring members by key; yield (offset, key, {rest of the name: bytes})."""
    stem, found, room = "", {}, MAX_LOADED
    for tar, info in members:
        name = info.name.removeprefix("./")
        match = _MEMBER.fullmatch(name)
        key, rest = (match[1], match[2]) if match else (name, "")
        if key != stem or rest in found:
            yield from _samples(stem, found, split)
            stem, found, room = key, {}, MAX_LOADED
        if len(found) == _MOST_MEMBERS:
            raise tarfile.ReadError(f"more than {_MOST_MEMBERS} files of one sample, {key!r:.100}")
        source = source_of(tar, info, room)
        room -= len(source.data or b"")  # all files of a sample are in memory at the same time
        found[rest] = info.offset, source
    yield from _samples(stem, found, split)


def _samples(
    stem: str, given: dict[str, tuple[int, ByteSource]], split: bool
) -> Iterator[tuple[int, str, dict[str, ByteSource]]]:
    """Yield one sample, or one per file for texts and programs without a JSON member."""
    members = _lowered(given)
    if split and "json" not in members:
        for member, (at, source) in members.items():
            plain = member == "" or (member == "txt" and "" not in members)
            yield at, stem if plain else f"{stem}.{member}", {member: source}
    elif members:
        at = next(iter(members.values()))[0]
        yield at, stem, {member: source for member, (_, source) in members.items()}


# Manifests ---------------------------------------------------------------------------------------


class Lines:
    """Reads the lines of a manifest; a cursor is (offset, number) of a line, numbered from 1."""

    def __init__(self, where: str, choices: Choices) -> None:
        self.where, self.label, self._choices = where, _name(where), choices
        self.total: int | None
        digest = hashlib.sha256()
        try:
            with open_input(where) as found:
                self.total = _count_lines(found.file, digest.update)
        except _DAMAGED:  # `read` reports it after the samples before the damage
            self.total = None
        self.identity = {"manifest": _name(where), "sha256": digest.hexdigest()}

    def read(self, cursor: Any = None) -> Iterator[tuple[Any, Pending]]:
        """See `Reader.read`."""
        at, number = cursor or (0, 1)
        name = _name(self.where)
        try:
            with open_input(self.where) as found:
                found.file.seek(at)
                while line := found.file.readline(_LONGEST_LINE):
                    place = f"{name}:{number}"
                    if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                        while (more := found.file.readline(1 << 20)) and more[-1:] != b"\n":
                            pass
                        told = f"{place}: longer than {_LONGEST_LINE} bytes; is it JSONL?"
                        yield [at, number], Broken(place, "too large", told)
                    elif line.strip():
                        yield [at, number], self._line(place, number, line)
                    at, number = found.file.tell(), number + 1
        except _DAMAGED as error:
            yield [at, number], Broken(name, "damaged file", f"{self.where}: {error}")

    def _line(self, place: str, number: int, data: bytes) -> Pending:
        choices = self._choices
        prefix = self.label if choices.prefix_keys else ""
        base = self.where.rpartition("/")[0] or "."
        default = numbered_key(self.label, number)
        return Line(place, default, data, base, choices.category, prefix, choices.follow_links)


def _count_lines(file: IO[bytes], update: Callable[[bytes], object]) -> int:
    """Count the non-empty lines of a file; pass all bytes to `update`."""
    lines, begun = 0, False
    while part := file.readline(_LONGEST_LINE):
        update(part)
        ends = part.endswith(b"\n")
        begun = begun or bool(part.strip()) or (not ends and len(part) == _LONGEST_LINE)
        if ends:
            lines, begun = lines + begun, False
    return lines + begun
