"""The web server: uvicorn with deadlines for clients that hold connections and send nothing.

uvicorn's keep-alive time-out ends with the first byte of a request. A client that never sends the
rest keeps its connection, and `limit_concurrency` such clients block the server. This module adds
three limits. A request, including its body, has a deadline that starts with the connection. If too
many connections wait for a request, the server closes the one that has waited longest. If a client
does not read its answer, the server closes the connection.
"""

import asyncio
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 20.0
"""Seconds from the connection, or the last answer, to the end of a client's request."""

UNREAD_S = 60.0
"""Seconds that an answer may wait for a client that does not read it."""

HANDSHAKE_S = 10.0
"""Seconds that a client may take for the TLS handshake."""

MOST_CONNECTIONS = 256
MOST_WAITING = 128  # connections without a complete request; active requests use the others


class Connection(H11Protocol):
    """A connection with deadlines."""

    _waits: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the deadline of the first request."""
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        self._look()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Start the deadline of the next request."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        self._waits = _cancelled(self._waits)
        self._unread = _cancelled(self._unread)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the deadline of a client that does not read."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the deadline, because the client has read."""
        self._unread = _cancelled(self._unread)
        super().resume_writing()

    def _look(self) -> None:
        """Run the deadline while a request or its body is incomplete."""
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
    """An asyncio event loop with a deadline for TLS handshakes; uvicorn has no such setting."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:  # pyright: ignore
        """Create a server like asyncio, with the deadline for TLS handshakes."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = HANDSHAKE_S
        return await super().create_server(*args, **options)


def web_server(
    app: ASGIApp, certificate: Path | None = None, key: Path | None = None
) -> uvicorn.Server:
    """Return a server for an application; with a certificate it uses https.

    The server logs no requests, because addresses may contain tokens and sample keys.
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
