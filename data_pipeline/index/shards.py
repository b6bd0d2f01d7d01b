"""Shards: plain tar files that webdataset, tar and Python's tarfile read.

A sample is `KEY.json` followed by its media `KEY.0.png`, `KEY.1.mp4`, ... The JSON is
{"meta": {...}, "segments": [...]}; docs/data_format.md says what a segment may be.

Headers carry no time, owner or mode of the machine, so equal samples give equal bytes.
"""

import hashlib
import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isal.isal_zlib import crc32  # zlib's numbers in a fraction of its time

_BLOCK = 512
_END = bytes(2 * _BLOCK)
# webdataset cuts a member's name at the first dot after the last slash, so a key has no dot. 80
# bytes leave room for ".32767.json" in a plain tar header (100 bytes).
_KEY = re.compile(r"[A-Za-z0-9_\-]+(/[A-Za-z0-9_\-]+)*")
MAX_KEY = 80


@dataclass(frozen=True)
class Member:
    """One file in a shard: its bytes start at `offset` and have CRC-32 `crc`."""

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
    """The JSON document of a sample, the same bytes whatever the order of its keys.

    Raises:
        ValueError: `meta` is not JSON (NaN included), or a text holds half a surrogate pair.
        TypeError: `meta` holds values that JSON has no form for.
    """
    document = {"meta": meta, "segments": list(segments)}
    text = json.dumps(
        document, ensure_ascii=False, sort_keys=True, allow_nan=False, separators=(",", ":")
    )
    return text.encode()


@dataclass(frozen=True)
class Framed:
    """The tar blocks of one sample; offsets of its members count from the first of their bytes."""

    data: bytes
    members: tuple[Member, ...]


def frame(key: str, document: bytes, media: Sequence[tuple[str, bytes]]) -> Framed:
    """Lay a sample out as it stands in a shard, wherever that will be.

    Args:
        key: see `check_sample_key`.
        document: from `sample_json`.
        media: (file name as in the document, such as "0.png"; bytes) in order.

    Returns:
        Blocks, with the member of the document first, then one per medium.
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
    """Collects samples in memory and hands out one tar file."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self.size = len(_END)
        self.samples = 0

    def add(self, key: str, document: bytes, media: Sequence[tuple[str, bytes]]) -> list[Member]:
        """Append a sample, arguments as of `frame`; returns its members, placed in the shard."""
        framed = frame(key, document, media)
        start = self.append(framed.data)
        return [Member(start + m.offset, m.length, m.crc) for m in framed.members]

    def append(self, blocks: bytes) -> int:
        """Append the blocks of a sample; returns where in the shard they begin."""
        start = self.size - len(_END)
        self._blocks.append(blocks)
        self.size += len(blocks)
        self.samples += 1
        return start

    def finish(self) -> Shard:
        """The tar file of all samples so far; the builder is empty afterwards."""
        data = b"".join((*self._blocks, _END))
        shard = Shard(data, hashlib.sha256(data).hexdigest(), self.samples)
        self._blocks, self.size, self.samples = [], len(_END), 0
        return shard
