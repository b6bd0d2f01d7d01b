"""Shards: plain tar files that webdataset, tar and Python's tarfile read.

A sample is `KEY.json` followed by its media `KEY.0.png`, `KEY.1.mp4`, ... The JSON is
{"segments": [{"kind": "text", "text": str, "loss": bool} | {"kind": "image", "file": "0.png"} |
{"kind": "video", "file": "1.mp4", "timestamps": ["00:00:00.000", ...]}], "meta": {...}}.

Headers carry no time, owner or mode of the machine, so equal samples give equal bytes.
"""

import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def padded(length: int) -> int:
    """Bytes a member of `length` takes in a tar file, header included."""
    return _BLOCK + (length + _BLOCK - 1) // _BLOCK * _BLOCK


class ShardBuilder:
    """Collects samples in memory and hands out one tar file."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.size = len(_END)
        self.samples = 0

    def add(self, key: str, document: bytes, media: Sequence[tuple[str, bytes]]) -> list[Member]:
        """Append a sample.

        Args:
            key: see `check_sample_key`.
            document: from `sample_json`.
            media: (file name as in the document, such as "0.png"; bytes) in order.

        Returns:
            The member of the document, then one per medium.
        """
        members = [self._append(f"{key}.json", document)]
        members += [self._append(f"{key}.{name}", data) for name, data in media]
        self.samples += 1
        return members

    def _append(self, name: str, data: bytes) -> Member:
        header = tarfile.TarInfo(name)
        header.size, header.mode = len(data), 0o444
        offset = self.size - len(_END) + _BLOCK
        filling = bytes(-len(data) % _BLOCK)
        self._pieces += (header.tobuf(tarfile.USTAR_FORMAT), data, filling)
        self.size += padded(len(data))
        return Member(offset, len(data), zlib.crc32(data))

    def finish(self) -> Shard:
        """The tar file of all samples so far; the builder is empty afterwards."""
        data = b"".join((*self._pieces, _END))
        shard = Shard(data, hashlib.sha256(data).hexdigest(), self.samples)
        self._pieces, self.size, self.samples = [], len(_END), 0
        return shard
