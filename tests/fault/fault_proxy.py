"""An HTTP/1.1 proxy on the loopback that breaks chosen answers of the S3 server behind it.

The Host header is passed on as it is, so signatures still verify. Faults are a script: each request
whose method and path match takes the first fault that waits for it; everything else passes.
"""

import asyncio
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

_SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    b"<Message>Please reduce your request rate.</Message></Error>"
)
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Fault:
    """One broken answer.

    kind: "truncate" closes the connection after `after` bytes of the body, "reset" does so with a
    TCP reset, "slowdown" answers 503, "late" holds the answer back for `delay` seconds.
    then: called when the fault has been done, before the client can ask again.
    """

    kind: str
    method: str = "GET"
    path: str = ""
    after: int = 0
    delay: float = 0.0
    then: Callable[[], object] | None = None


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str
    if_match: str
    fault: str


class FaultProxy:
    """Context manager; `faults` is the script, `requests` what came by."""

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        self._upstream = (address.hostname, address.port)
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.endpoint = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        start = asyncio.start_server(self._serve, _HOST, 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.endpoint = f"http://{_HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, head: bytes) -> Fault | None:
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)

        def header(name: bytes) -> str:
            found = re.search(rb"(?i)\r\n" + name + rb": *([^\r]*)", head)
            return found[1].decode() if found else ""

        for fault in self.faults:
            if fault.method == method and re.search(fault.path, path):
                self.faults.remove(fault)
                break
        else:
            fault = None
        self.requests.append(
            Request(
                method, path, header(b"range"), header(b"if-match"), fault.kind if fault else ""
            )
        )
        return fault

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False when the connection is to be closed."""
        head = await reader.readuntil(b"\r\n\r\n")
        fault = self._take(head)
        if fault and fault.kind == "slowdown":
            writer.write(
                b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n" % len(_SLOW_DOWN) + _SLOW_DOWN
            )
            await writer.drain()
            return False
        if fault and fault.kind == "late":
            await asyncio.sleep(fault.delay)
        # One upstream connection per request: its end is the end of the answer.
        head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)[:-2] + b"Connection: close\r\n\r\n"
        upstream, sink = await asyncio.open_connection(*self._upstream)
        try:
            sink.write(head)
            body = asyncio.ensure_future(_copy(reader, sink))  # nothing, or the body of a PUT
            try:
                await self._answer(upstream, writer, fault)
            finally:
                body.cancel()
        finally:
            sink.close()
        return False

    async def _answer(
        self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None
    ) -> None:
        if fault is None or fault.kind == "late":
            return await _copy(upstream, writer)
        head = await upstream.readuntil(b"\r\n\r\n")
        writer.write(head + await upstream.readexactly(fault.after))
        await writer.drain()
        if fault.then:
            await asyncio.get_running_loop().run_in_executor(None, fault.then)
        if fault.kind == "reset":
            # What is still in flight may be lost with a reset; let it arrive first.
            await asyncio.sleep(0.05)
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
