"""Runs one ranged GET and reads its body; another thread may abandon it.

The body is read with `read1`, which returns bytes as soon as they arrive. So a broken connection
does not lose the bytes before it, and the socket's timeout detects a stalled connection.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from data_pipeline.store.s3_form import BrokenBody, check_body

# Maximum number of bytes per read from the socket.
_PIECE = 256 << 10
# This many bytes count as progress, so a large object on a slow line does not fail.
PROGRESS = 1 << 20


class Sent:
    """Send time of a request (time.monotonic()), and seconds it waited for the budget before."""

    def __init__(self) -> None:
        self.sent: float | None = None
        self.waited = 0.0


class BodyRead(Sent):
    """A read in progress, as a `Flight` of `hedge`; it holds the result after `run`.

    Args:
        where: name of the object, for messages.
        ask: sends GetObject with this mark and the given parameters; returns the reply.
        check: called with the ETag of the reply; raises if the version is wrong.
        count: called at the end as `count(bytes=...)` with the number of bytes received.
        start: first byte.
        length: bytes to read; None reads all remaining bytes.
        etag: version to read; None reads any.
        patience: seconds within which `PROGRESS` bytes (or the rest) must arrive.

    Attributes:
        pieces: received pieces of the body.
        got: number of bytes received.
        error: reason for an incomplete body; None if the body is complete.
        opened: True if the server responded before the error.
    """

    def __init__(
        self,
        where: str,
        ask: Callable[[Sent, dict[str, Any]], Any],
        check: Callable[[str], None],
        count: Callable[..., None],
        start: int,
        length: int | None,
        etag: str | None,
        patience: float,
    ) -> None:
        super().__init__()
        self._where, self._ask, self._check, self._count = where, ask, check, count
        self._start, self._length, self.etag = start, length, etag
        self._patience = patience
        self.pieces: list[bytes] = []
        self.got = 0
        self.error: Exception | None = None
        self.opened = False
        self._abandoned = False
        self._stream: Any = None

    def run(self) -> None:
        """Send the request and read the body."""
        try:
            reply = self._ask(self, self._request())
            self.opened = True
            # botocore returns urllib3's response as the stream. Closing it ends the connection,
            # unless the whole body was read; then the connection is already back in the pool.
            with reply["Body"] as stream:
                size = self._accept(reply)
                self._stream = stream
                self._read(stream, size)
        except Exception as error:
            self.error = error
        self._stream = None
        self._count(bytes=self.got)

    def abandon(self) -> None:
        """End the read soon; wakes a thread that reads the body, others run into their timeout."""
        self._abandoned = True
        stream = self._stream
        if stream is not None:
            with suppress(ValueError, RuntimeError, OSError):  # the read has just ended
                stream.shutdown()

    def _request(self) -> dict[str, Any]:
        request: dict[str, Any] = {}
        if self._start or self._length is not None:
            last = "" if self._length is None else self._start + self._length - 1
            request["Range"] = f"bytes={self._start}-{last}"
        if self.etag is not None:
            request["IfMatch"] = self.etag
        return request

    def _accept(self, reply: dict[str, Any]) -> int:
        """Check the head of a response and return the size of its body."""
        size = check_body(reply, self._start, self._length)
        self._check(reply["ETag"])
        self.etag = reply["ETag"]
        return size

    def _read(self, stream: Any, size: int) -> None:
        since, mark = time.monotonic(), 0
        try:
            while piece := stream.read1(_PIECE):
                self.pieces.append(piece)
                self.got += len(piece)
                if self._abandoned:
                    break
                now = time.monotonic()
                if self.got - mark >= PROGRESS:
                    since, mark = now, self.got
                elif now - since > self._patience:
                    raise BrokenBody(f"only {self.got - mark} bytes came in {now - since:.0f} s")
        except Exception:
            if self.got != size:
                raise
        if self.got != size:
            raise BrokenBody(f"{self.got} of {size} bytes came")
