"""Shards: plain tar files that webdataset, tar and Python's tarfile can read.

A sample is `KEY.json` followed by its media `KEY.0.png`, `KEY.1.mp4`, ... The JSON is
{"meta": {...}, "segments": [...]}; docs/data_format.md describes the segments.

Headers contain no time, owner or machine-dependent mode, so equal samples give equal bytes.
"""

import hashlib
import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isal.isal_zlib import crc32  # same values as zlib, several times as fast

_BLOCK = 512
_END = bytes(2 * _BLOCK)
# webdataset cuts a member's name at the first dot after the last slash, so a key has no dot. 80
# bytes leave room for ".32767.json" in a plain tar header (100 bytes).
_KEY = re.compile(r"[A-Za-z0-9_\-]+(/[A-Za-z0-9_\-]+)*")
MAX_KEY = 80


@dataclass(frozen=True)
class Member:
    """A file in a shard; its bytes start at `offset` and have CRC-32 `crc`."""

    offset: int
    length: int
    crc: int


@dataclass(frozen=True)
class Shard:
    """A finished tar file and its SHA-256 (hex)."""

    data: bytes
    sha256: str
    samples: int


def check_sample_key(key: str) -> None:
    """Raise ValueError unless `key` can name a sample in a tar file."""
    if not isinstance(key, str) or len(key) > MAX_KEY or not _KEY.fullmatch(key):
        raise ValueError(
            f"sample key {key!r}: use at most {MAX_KEY} letters, digits, '_', '-' and single '/'"
        )


def check_source_name(name: str) -> None:
    """Raise ValueError unless `name` can name a source."""
    check_sample_key(name)
    if "/" in name:
        raise ValueError(f"source name {name!r}: use letters, digits, '_' and '-'")


def sample_json(segments: Sequence[dict[str, Any]], meta: dict[str, Any]) -> bytes:
    """Return the JSON document of a sample; the bytes do not depend on the order of its keys.

    Raises:
        ValueError: `meta` is not JSON (NaN included), or a text has a lone surrogate.
        TypeError: `meta` has values that JSON cannot represent.
    """
    document = {"meta": meta, "segments": list(segments)}
    text = json.dumps(
        document, ensure_ascii=False, sort_keys=True, allow_nan=False, separators=(",", ":")
    )
    return text.encode()


@dataclass(frozen=True)
class Framed:
    """The tar blocks of one sample; member offsets are relative to the start of `data`."""

    data: bytes
    members: tuple[Member, ...]


def frame(key: str, document: bytes, media: Sequence[tuple[str, bytes]]) -> Framed:
    """Build the tar blocks of a sample, independent of its position in a shard.

    Args:
        key: see `check_sample_key`.
        document: from `sample_json`.
        media: (file name as in the document, such as "0.png"; bytes) in order.

    Returns:
        The blocks, and their members: first the document, then one per media file.
    """
    blocks: list[bytes] = []
    members: list[Member] = []
    size = 0
    for name, data in (("json", document), *media):
        header = tarfile.TarInfo(f"{key}.{name}")
        header.size, header.mode = len(data), 0o444
        blocks += (header.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % _BLOCK))
        members.append(Member(size + _BLOCK, len(data), crc32(data)))
        size += _BLOCK + (len(data) + _BLOCK - 1) // _BLOCK * _BLOCK
    return Framed(b"".join(blocks), tuple(members))


class ShardBuilder:
    """Collects samples in memory and builds one tar file."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self.size = len(_END)
        self.samples = 0

    def add(self, key: str, document: bytes, media: Sequence[tuple[str, bytes]]) -> list[Member]:
        """Append a sample (arguments as for `frame`); return its members with shard offsets."""
        framed = frame(key, document, media)
        start = self.append(framed.data)
        return [Member(start + m.offset, m.length, m.crc) for m in framed.members]

    def append(self, blocks: bytes) -> int:
        """Append the blocks of a sample; return their offset in the shard."""
        start = self.size - len(_END)
        self._blocks.append(blocks)
        self.size += len(blocks)
        self.samples += 1
        return start

    def finish(self) -> Shard:
        """Return the tar file of all samples so far and empty the builder."""
        data = b"".join((*self._blocks, _END))
        shard = Shard(data, hashlib.sha256(data).hexdigest(), self.samples)
        self._blocks, self.size, self.samples = [], len(_END), 0
        return shard
