"""The web server: uvicorn, with deadlines for clients that hold connections and send nothing.

uvicorn's keep-alive time-out ends with a request's first byte, so a client that never sends the
rest keeps its connection, and as many as `limit_concurrency` of them close the server. Here a
request has a deadline from its connection on, body included; where too many connections wait for
a request, the longest waiting one makes room; and an answer that nobody reads ends its connection.
"""

import asyncio
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 20.0
"""So long a client may take from a connection, or its last answer, to the end of a request."""

UNREAD_S = 60.0
"""So long an answer may wait for a client that does not read it."""

HANDSHAKE_S = 10.0
"""So long a client may take for the TLS handshake."""

MOST_CONNECTIONS = 256
MOST_WAITING = 128  # connections without a whole request; those that are worked on have the others


class Connection(H11Protocol):
    """A connection with deadlines."""

    _waits: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        self._look()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the deadlines."""
        self._waits = _cancelled(self._waits)
        self._unread = _cancelled(self._unread)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """End that: it has read."""
        self._unread = _cancelled(self._unread)
        super().resume_writing()

    def _look(self) -> None:
        """Run the clock as long as a request, with its body, is not whole."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._waits = _cancelled(self._waits)
        elif self._waits is None and not self.transport.is_closing():
            self._waits = self.loop.call_later(REQUEST_S, self.transport.abort)
            waiting = [one for one in self.connections if _is_waiting(one)]
            if len(waiting) > MOST_WAITING:
                min(waiting, key=_ends).transport.abort()


def _is_waiting(one: Any) -> bool:
    return one._waits is not None and not one.transport.is_closing()


def _ends(one: Any) -> float:
    return one._waits.when()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class EventLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, with a deadline for TLS handshakes, which no setting of uvicorn has."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:  # pyright: ignore
        """As asyncio's."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = HANDSHAKE_S
        return await super().create_server(*args, **options)


def web_server(
    app: ASGIApp, certificate: Path | None = None, key: Path | None = None
) -> uvicorn.Server:
    """Return a server of an application, by https with a certificate.

    It keeps no log of requests: addresses hold tokens and keys of samples.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            loop=f"{__name__}:{EventLoop.__name__}",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=3,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
    )
