"""Checks one shard against the index in one sequential pass over its bytes.

The pass checks SHA-256, tar headers, CRC-32s, documents and media. It does not stop at a fault: it
records the bad entry and continues at the offset of the next entry in the index.
"""

import hashlib
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from isal.isal_zlib import crc32  # same values as zlib, several times as fast

from data_pipeline.index.columns import SourceIndex
from data_pipeline.inspect.document import describe, document_faults, media_faults
from data_pipeline.inspect.problem import Fault, Problem
from data_pipeline.store.open import MissingKey, ObjectChanged, Span, Store, get_many
from data_pipeline.text import Tokenizer

_PART = 4 << 20  # bytes of a shard per request
_BLOCK = 512
_SPOT_BYTES = 64 << 20  # approximate batch size of spot checks


@dataclass(frozen=True)
class ShardReport:
    """Result of checking one shard, or only the index if shard is ""."""

    shard: str
    samples: int = 0
    files: int = 0
    bytes: int = 0
    problems: tuple[Problem, ...] = ()


class _Member(NamedTuple):
    """A file in a shard, according to the index; `media` is -1 for the document."""

    offset: int
    length: int
    crc: int
    sample: int
    media: int


@dataclass
class _Sample:
    """Data of a sample collected so far; kept until the last of its files has been read."""

    left: int  # files not read yet
    files: dict[int, str] = field(default_factory=dict)  # media number -> name in the document
    names: dict[int, str] = field(default_factory=dict)  # media number -> name in the tar
    timestamps: dict[int, list[str]] = field(default_factory=dict)


class ShardCheck:
    """The check of one shard."""

    def __init__(
        self,
        store: Store,
        index: SourceIndex,
        number: int,
        tokenizer: Tokenizer | None,
        decode: bool,
        progress: Callable[[int], None],
    ):
        self._store, self._index = store, index
        self._tokenizer, self._decode, self._progress = tokenizer, decode, progress
        self._info = index.shards[number]
        first, end = np.searchsorted(index.shard, [number, number + 1]).tolist()
        self._samples = range(first, end)
        self._redacted = frozenset(index.redacted)
        self._open: dict[int, _Sample] = {}
        self._problems: list[Problem] = []
        self._files = self._bytes = 0
        self._size, self._etag = 0, ""

    def run(self, share: float) -> ShardReport:
        """Check the shard, or a share of its samples."""
        key = self._info.key
        chosen = [i for i in self._samples if int(i * share) > int((i - 1) * share) or i == 0]
        try:
            self._size, self._etag = (info := self._store.head(key)).size, info.etag
            if self._size != self._info.size:
                self._note("shard size", f"{self._size} bytes, {self._info.size} in the index")
            self._whole() if share == 1 else self._spots(chosen)
        except MissingKey:
            lost = f"no such object; it held {len(self._samples)} samples"
            self._note("shard missing", lost)
            chosen = []
        except ObjectChanged as error:
            self._note("shard changed", str(error))
        for sample in sorted(self._open):
            self._check_names(sample)
        return ShardReport(key, len(chosen), self._files, self._bytes, tuple(self._problems))

    def _note(self, kind: str, detail: str, sample: int | None = None) -> None:
        name = "" if sample is None else self._index.key_of(sample)
        self._problems.append(Problem(self._index.name, kind, detail, self._info.key, name))

    def _members(self, samples: Sequence[int]) -> list[_Member]:
        """Return the files of samples, in the order of their offsets."""
        index, members = self._index, []
        of_json = (index.json_offset, index.json_length, index.json_crc)
        of_media = (index.item_offset, index.item_length, index.item_crc)
        for sample in samples:
            members.append(_Member(*_ints(of_json, sample), sample, -1))
            files: dict[int, _Member] = {}
            for item in range(int(index.item_ptr[sample]), int(index.item_ptr[sample + 1])):
                number = int(index.item_media[item])
                member = _Member(*_ints(of_media, item), sample, number)
                if files.setdefault(number, member) != member:
                    self._note("index", f"the items of media file {number} lie apart", sample)
            members += files.values()
            self._open[sample] = _Sample(left=1 + len(files))
        return sorted(members)

    def _inside(self, members: Sequence[_Member]) -> list[_Member]:
        """Return the members that fit in the shard; report the samples of the others as lost."""
        kept, lost = [], set[int]()
        for member in members:
            fits = member.offset >= _BLOCK and 0 <= member.length <= self._size - member.offset
            kept.append(member) if fits else lost.add(member.sample)
        for sample in sorted(lost):
            self._note("lost", f"not within the {self._size} bytes of the shard", sample)
        return kept

    def _whole(self) -> None:
        stream = _Stream(self._store, self._info.key, self._size, self._etag, self._progress)
        members = self._members(self._samples)
        inside = self._inside(members)
        for member in inside:
            start = member.offset - _BLOCK
            if start < stream.at:
                self._note(
                    "tar",
                    f"{self._name_of(member)} at {member.offset} overlaps what lies before it",
                    member.sample,
                )
                continue
            if start > stream.at:
                where, found = stream.at, stream.describe(start - stream.at)
                gap = f"{start - where} bytes at {where} that the index does not know"
                self._note("tar", gap + found)
            header, data = stream.read(_BLOCK), stream.read(member.length)
            self._member(member, header, data, stream.read(-member.length % _BLOCK))
        if len(inside) == len(members):  # otherwise a truncated file follows
            self._check_end(stream)
        self._bytes = self._size
        if (found := stream.finish()) != self._info.sha256:
            self._note("shard hash", f"{found}, {self._info.sha256} in the index")

    def _check_end(self, stream: "_Stream") -> None:
        """Check that the tar file ends with at least two blocks of zeros."""
        where, left = stream.at, self._size - stream.at
        found = stream.describe(left)
        if found:
            self._note("tar", f"{left} bytes at {where} that the index does not know{found}")
        elif left < 2 * _BLOCK:
            self._note("tar", f"{left} bytes after the last file, a tar ends with {2 * _BLOCK}")

    def _spots(self, samples: Sequence[int]) -> None:
        batch: list[_Member] = []
        size = 0
        for member in self._inside(self._members(samples)):
            batch.append(member)
            size += member.length
            if size >= _SPOT_BYTES:
                self._spot_batch(batch)
                batch, size = [], 0
        self._spot_batch(batch)

    def _spot_batch(self, batch: Sequence[_Member]) -> None:
        key = self._info.key
        spans = [Span(key, member.offset - _BLOCK, _BLOCK + member.length) for member in batch]
        for member, data in zip(batch, get_many(self._store, spans, threads=1), strict=True):
            self._progress(len(data))
            self._bytes += len(data)
            self._member(member, data[:_BLOCK], data[_BLOCK:], b"")

    def _member(self, member: _Member, header: bytes, data: bytes, filling: bytes) -> None:
        """Check one file of the shard."""
        self._files += 1
        sample = self._open[member.sample]
        self._header(member, header, sample)
        if any(filling):
            detail = f"bytes after {self._name_of(member)} are not zero"
            self._note("tar", detail, member.sample)
        if (crc := crc32(data)) != member.crc:
            kind = "json crc" if member.media < 0 else "media crc"
            detail = f"{self._name_of(member)}: {crc:08x}, {member.crc:08x} in the index"
            self._note(kind, detail, member.sample)
        elif member.sample in self._redacted:
            pass  # the matching checksum proves that the bytes are erased
        elif member.media < 0:
            self._document(member.sample, data, sample)
        else:
            self._medium(member, data, sample)
        sample.left -= 1
        if not sample.left:
            self._check_names(member.sample)
            del self._open[member.sample]

    def _header(self, member: _Member, header: bytes, sample: _Sample) -> None:
        """Check a header except for its name, which needs the document."""
        try:
            found = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            detail = f"no header of {self._name_of(member)} at {member.offset - _BLOCK}: {error}"
            self._note("tar", detail, member.sample)
            return
        sample.names[member.media] = found.name
        if found.size != member.length or not found.isreg():
            detail = (
                f"{found.name!r} at {member.offset} is of {found.size} bytes and type "
                f"{found.type!r}, expected {member.length} bytes of a regular file"
            )
            self._note("tar", detail, member.sample)

    def _name_of(self, member: _Member) -> str:
        kind = "json" if member.media < 0 else str(member.media)
        return f"{self._index.key_of(member.sample)}.{kind}"

    def _document(self, sample: int, data: bytes, seen: _Sample) -> None:
        found = describe(data, self._tokenizer)
        if isinstance(found, Fault):
            self._note(found.kind, found.detail, sample)
            return
        seen.files, seen.timestamps = found.files, found.timestamps
        for fault in document_faults(found, self._index, sample):
            self._note(fault.kind, fault.detail, sample)

    def _medium(self, member: _Member, data: bytes, seen: _Sample) -> None:
        index = self._index
        first, end = (int(at) for at in index.item_ptr[member.sample : member.sample + 2])
        items = [i for i in range(first, end) if int(index.item_media[i]) == member.media]
        suffix = seen.names.get(member.media, "").rpartition(".")[2]
        times = seen.timestamps.get(member.media)
        found = media_faults(data, index, items, suffix, times, decode_all=self._decode)
        for fault in found:
            detail = f"{self._name_of(member)}: {fault.detail}"
            self._note(fault.kind, detail, member.sample)

    def _check_names(self, sample: int) -> None:
        """Compare the names of a sample's files in the tar with its key and its document."""
        key, seen = self._index.key_of(sample), self._open[sample]
        for number, name in sorted(seen.names.items()):
            if number < 0:
                wanted, right = f"{key}.json", name == f"{key}.json"
            elif number in seen.files:
                wanted = f"{key}.{seen.files[number]}"
                right = name == wanted
            else:  # the document could not be read
                wanted, right = f"{key}.{number}.*", name.startswith(f"{key}.{number}.")
            if not right:
                self._note("tar", f"a file {name!r} where {wanted!r} is expected", sample)


def _ints(columns: Sequence[np.ndarray], line: int) -> tuple[int, int, int]:
    first, second, third = (int(column[line]) for column in columns)
    return first, second, third


class _Stream:
    """An object read sequentially in parts and hashed at the same time."""

    def __init__(
        self, store: Store, key: str, size: int, etag: str, progress: Callable[[int], None]
    ):
        self.at = 0
        self._store, self._key, self._size, self._etag = store, key, size, etag
        self._progress = progress
        self._digest = hashlib.sha256()
        self._part, self._part_at = b"", 0  # the current part and its offset

    def read(self, length: int) -> bytes:
        """Return the next `length` bytes, fewer at the end of the object."""
        return b"".join(self._pieces(length))

    def describe(self, length: int) -> str:
        """Skip `length` bytes; return "" if all are zero, otherwise a description of them."""
        name, zero, first = "", True, True
        for piece in self._pieces(length):
            if first and len(piece) >= _BLOCK:
                try:
                    found = tarfile.TarInfo.frombuf(piece[:_BLOCK], "utf-8", "surrogateescape")
                    name = f": a file {found.name!r}"
                except tarfile.HeaderError:
                    pass
            zero, first = zero and piece.count(0) == len(piece), False
        return "" if zero else name or ": no tar header there"

    def finish(self) -> str:
        """Read the rest and return the SHA-256 (hex) of the whole object."""
        for _ in self._pieces(self._size - self.at):
            pass
        return self._digest.hexdigest()

    def _pieces(self, length: int) -> Iterator[bytes]:
        end = min(self.at + length, self._size)
        while self.at < end:
            if self.at == self._part_at + len(self._part):
                self._next_part()
            start = self.at - self._part_at
            piece = self._part[start : start + end - self.at]
            self.at += len(piece)
            yield piece

    def _next_part(self) -> None:
        self._part_at += len(self._part)
        length = min(_PART, self._size - self._part_at)
        self._part = self._store.get(self._key, self._part_at, length, etag=self._etag)
        self._digest.update(self._part)
        self._progress(length)
