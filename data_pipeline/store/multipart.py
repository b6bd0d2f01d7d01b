"""A large file as one S3 object: parts sent side by side, each with retries of its own.

boto3's own transfer manager would send requests that neither our retries nor the node's request
budget know. The object appears with the last request or not at all.
"""

import base64
import hashlib
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from data_pipeline.store.objects import MissingKey, StoreError, in_threads

# S3's limits: parts of 5 MiB and more (but the last), at most 10,000 of them.
_PART = 8 << 20
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
    step = max(_PART, -(-size // _MOST_PARTS))
    mark = {"upload": secrets.token_hex(8)}
    upload = call("create_multipart_upload", key, Metadata=mark)["UploadId"]

    def send(number: int) -> dict[str, Any]:
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

    try:
        parts = in_threads(send, range(-(-size // step)), _THREADS)
        try:
            whole = {"Parts": parts}
            call("complete_multipart_upload", key, UploadId=upload, MultipartUpload=whole)
        except MissingKey:
            # No such upload: either it was done and the answer was lost, and so it was asked for
            # twice, or somebody else took it back. The mark tells.
            if call("head_object", key).get("Metadata") != mark:
                raise
    except BaseException:
        with suppress(StoreError):  # the first error is the one to tell
            call("abort_multipart_upload", key, patience=0.0, UploadId=upload)
        raise
