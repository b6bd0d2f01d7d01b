"""Multipart upload: writes a large file as one S3 object, with retries for each part.

boto3's transfer manager would bypass our retries and the node's request budget. The object becomes
visible with the last request, or not at all.
"""

import base64
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from isal.isal_zlib import crc32  # same results as zlib, but much faster

from data_pipeline.store.objects import MissingKey, StoreError, in_threads

# S3's limits: parts of at least 5 MiB (except the last), at most 10,000 parts.
_PART = 16 << 20
_MOST_PARTS = 10_000
_THREADS = 4  # parts in memory at the same time


class Call(Protocol):
    """Function that sends one S3 operation for a key, with retries.

    `patience` limits the retries in seconds; None uses the default.
    """

    def __call__(
        self, operation: str, key: str, *, patience: float | None = None, **request: Any
    ) -> Any:
        """Return the reply."""
        ...


def md5_of(body: bytes) -> str:
    """Return the Content-MD5 header of a body; the server refuses a body that differs."""
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def crc32_of(body: bytes) -> str:
    """Return the x-amz-checksum-crc32 header of a body."""
    return base64.b64encode(crc32(body).to_bytes(4, "big")).decode()


def part_size(size: int) -> int:
    """Return the size of each part except the last, for an object of `size` bytes."""
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
        call: sends a request with retries, so a failure repeats only one part.
        key: key of the object.
        path: path of the file.
        size: size of the file in bytes.
        sent: called with the size of each part that has arrived, from several threads.

    Raises:
        StoreError: an error of `call`; the upload is aborted.
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
    """Write an object from pieces that are sent as parts, one after the other.

    Args:
        call: as in `put_parts`.
        key: key of the object.
        pieces: pieces of `part_size` bytes, except the last; an error from them aborts the upload.
        sums: send the CRC-32 of each part, which the server returns, instead of its MD5.

    Returns:
        The object's ETag, and whether the server verified the CRC-32 of all parts.
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
    """Begin an upload, send its parts and complete it, or abort it; return the ETag."""
    mark = {"upload": secrets.token_hex(8)}
    upload = call("create_multipart_upload", key, Metadata=mark, **more)["UploadId"]
    try:
        parts = send_all(upload)
        try:
            whole = {"Parts": parts}
            done = call("complete_multipart_upload", key, UploadId=upload, MultipartUpload=whole)
        except MissingKey:
            # The upload is unknown: either it completed, the response was lost and a retry failed,
            # or another process aborted it. The mark distinguishes the two cases.
            done = call("head_object", key)
            if done.get("Metadata") != mark:
                raise
        return done["ETag"]
    except BaseException:
        with suppress(StoreError):  # report the first error
            call("abort_multipart_upload", key, patience=0.0, UploadId=upload)
        raise
