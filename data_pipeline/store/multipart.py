"""A large file as one S3 object: parts sent side by side, each with retries of its own.

boto3's own transfer manager would send requests that neither our retries nor the node's request
budget know. The object appears with the last request or not at all.
"""

import base64
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from isal.isal_zlib import crc32  # zlib's numbers in a fraction of its time

from data_pipeline.store.objects import MissingKey, StoreError, in_threads

# S3's limits: parts of 5 MiB and more (but the last), at most 10,000 of them.
_PART = 16 << 20
_MOST_PARTS = 10_000
_THREADS = 4  # parts in memory at a time


class Call(Protocol):
    """Send one S3 operation for a key; `patience` seconds of retries, None: as always."""

    def __call__(
        self, operation: str, key: str, *, patience: float | None = None, **request: Any
    ) -> Any:
        """Return the reply."""
        ...


def md5_of(body: bytes) -> str:
    """Return what a Content-MD5 header says: the server refuses a body that arrived otherwise."""
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def crc32_of(body: bytes) -> str:
    """Return what an x-amz-checksum-crc32 header says."""
    return base64.b64encode(crc32(body).to_bytes(4, "big")).decode()


def part_size(size: int) -> int:
    """Return the bytes of each part, but the last, of an object of `size` bytes."""
    return max(_PART, -(-size // _MOST_PARTS))


def put_parts(
    call: Call,
    key: str,
    path: str | os.PathLike[str],
    size: int,
    sent: Callable[[int], None] | None = None,
) -> None:
    """Write the file at `path`, `size` bytes, as object `key`.

    Args:
        call: sends a request; it tries again by itself, so that a part is what is sent twice.
        key: of the object.
        path: of the file.
        size: its bytes.
        sent: called with the bytes of each part that has arrived, from several threads.

    Raises:
        StoreError: what `call` raises; the parts are taken back.
        OSError: the file cannot be read, or is shorter than `size`.
    """
    step = part_size(size)

    def send(upload: str, number: int) -> dict[str, Any]:
        with open(path, "rb") as file:
            file.seek(number * step)
            body = file.read(step)
        if len(body) != min(step, size - number * step):
            raise OSError(f"{os.fspath(path)}: became shorter than {size} bytes while it was read")
        reply = call(
            *("upload_part", key),
            **{"UploadId": upload, "PartNumber": number + 1, "Body": body},
            ContentMD5=md5_of(body),
        )
        if sent is not None:
            sent(len(body))
        return {"PartNumber": number + 1, "ETag": reply["ETag"]}

    numbers = range(-(-size // step))
    _upload(call, key, lambda upload: in_threads(partial(send, upload), numbers, _THREADS))


def put_pieces(call: Call, key: str, pieces: Iterable[bytes], *, sums: bool) -> tuple[str, bool]:
    """Write an object of pieces, each a part, sent one after the other.

    Args:
        call: as of `put_parts`.
        key: of the object.
        pieces: of `part_size` bytes but the last; what they raise takes all parts back.
        sums: send the CRC-32 of each part, which the server returns, not its MD5.

    Returns:
        The object's ETag, and whether the server compared all parts with their CRC-32.
    """
    unconfirmed = 0

    def send(upload: str, number: int, body: bytes) -> dict[str, Any]:
        nonlocal unconfirmed
        mine = crc32_of(body) if sums else ""
        check: dict[str, Any] = {"ChecksumCRC32": mine} if sums else {"ContentMD5": md5_of(body)}
        what = {"UploadId": upload, "PartNumber": number, "Body": body}
        reply = call("upload_part", key, **what, **check)
        part = {"PartNumber": number, "ETag": reply["ETag"]}
        if mine and reply.get("ChecksumCRC32") == mine:
            return part | check
        unconfirmed += 1
        return part

    def send_all(upload: str) -> list[dict[str, Any]]:
        return [send(upload, number, body) for number, body in enumerate(pieces, 1)]

    more = {"ChecksumAlgorithm": "CRC32"} if sums else {}
    etag = _upload(call, key, send_all, **more)
    return etag, unconfirmed == 0


def _upload(
    call: Call, key: str, send_all: Callable[[str], list[dict[str, Any]]], **more: Any
) -> str:
    """Begin an upload, have its parts sent and complete it, or take it back; returns the ETag."""
    mark = {"upload": secrets.token_hex(8)}
    upload = call("create_multipart_upload", key, Metadata=mark, **more)["UploadId"]
    try:
        parts = send_all(upload)
        try:
            whole = {"Parts": parts}
            done = call("complete_multipart_upload", key, UploadId=upload, MultipartUpload=whole)
        except MissingKey:
            # No such upload: either it was done and the answer was lost, and so it was asked for
            # twice, or somebody else took it back. The mark tells.
            done = call("head_object", key)
            if done.get("Metadata") != mark:
                raise
        return done["ETag"]
    except BaseException:
        with suppress(StoreError):  # the first error is the one to tell
            call("abort_multipart_upload", key, patience=0.0, UploadId=upload)
        raise
