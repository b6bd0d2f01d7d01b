"""One ranged GET and its body, which another thread may abandon.

The body is read with `read1`: what has arrived is kept at once, so that a connection that breaks
loses nothing that came before, and a stalled one is noticed by the socket's timeout.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from data_pipeline.store.s3_form import BrokenBody, check_body

# At most so much of a body is taken from the socket at a time.
_PIECE = 256 << 10
# So many bytes are progress: a large object on a poor line is slow, not hopeless.
PROGRESS = 1 << 20


class Sent:
    """When a request left (time.monotonic()), and how long it had waited for the budget before."""

    def __init__(self) -> None:
        self.sent: float | None = None
        self.waited = 0.0


class BodyRead(Sent):
    """A read on its way: a `Flight` of `hedge`. After `run` it holds what came of it.

    Args:
        where: the object, for messages.
        ask: sends GetObject with the given parameters and this as the mark; returns the reply.
        check: called with the ETag of the reply; raises if it is not the right version.
        start: first byte.
        length: bytes to read; None: all that follow.
        etag: the version to read, None: any.
        count: called at the end as `count(bytes=...)`, with those that came.
        patience: seconds in which `PROGRESS` bytes (or the rest) have to come.

    Attributes:
        pieces: what has arrived; `got` bytes in all.
        error: why that is not everything; None when it is.
        opened: was there an answer before the error?
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
            # botocore hands out urllib3's response in this way. At the end it is closed: a
            # connection with a whole body read is back in the pool by then, any other ends.
            with reply["Body"] as stream:
                size = self._accept(reply)
                self._stream = stream
                self._read(stream, size)
        except Exception as error:
            self.error = error
        self._stream = None
        self._count(bytes=self.got)

    def abandon(self) -> None:
        """End soon. A thread that sits in the socket is woken; one without an answer times out."""
        self._abandoned = True
        stream = self._stream
        if stream is not None:
            with suppress(ValueError, RuntimeError, OSError):  # it has just ended by itself
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
        """Check the head of an answer; return the size of its body."""
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
