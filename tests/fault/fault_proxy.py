"""An HTTP/1.1 proxy on the loopback that breaks chosen answers of the S3 server behind it.

It passes the Host header on unchanged, so signatures still verify. `proxy.faults` is a list that a
test may change at any time:

    with FaultProxy(server.endpoint) as proxy:
        store = open_store("s3://bucket", endpoint=proxy.endpoint)
        proxy.faults.append(Fault("truncate", path="tar", after=1000))           # the next such GET
        proxy.faults.append(Fault("slowdown", method="", times=None, p=0.2))     # one in five
        proxy.faults.append(Fault("slowdown", method="", times=None, seconds=3)) # all, for 3 s
        proxy.faults.append(Fault("corrupt", after=50, delay=0.1, rate=100_000)) # late, slow, wrong
        ...
        assert proxy.count("truncate") == 1

Each request gets the first fault in the list that matches it; a request without a match passes. A
used-up fault leaves the list. `proxy.requests` records the requests in order of arrival.
"""

import array
import asyncio
import fcntl
import random
import re
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

_HOST = "127.0.0.1"
KINDS = (
    *("slowdown", "error", "expired", "refuse", "odd"),  # the server does not see the request
    *("late", "slow", "truncate", "reset", "stall", "corrupt"),  # the server's answer, altered
)

# Answers that no S3 server gives, by name: status, headers, body.
ODD = {
    "page": ("200 OK", "Content-Type: text/html", "<!DOCTYPE html><html><p>Welcome</p></html>"),
    "error": ("200 OK", "", "<Error><Code>InternalError</Code></Error>"),
    "empty": ("200 OK", "", ""),
    "forbidden": ("403 Forbidden", "Content-Type: text/html", "<html><h1>Forbidden</h1>"),
    "nothing": ("404 Not Found", "Content-Type: text/html", "<html><h1>Not Found</h1>"),
    "redirect": ("307 Temporary Redirect", "Location: https://elsewhere.test/", ""),
    "moved": ("301 Moved Permanently", "Location: https://elsewhere.test/", ""),
    "skewed": ("403 Forbidden", "", "<Error><Code>RequestTimeTooSkewed</Code></Error>"),
}


@dataclass(frozen=True)
class Request:
    """A recorded request. `fault` is the kind of the applied fault, "" for none."""

    method: str
    path: str
    range: str
    if_match: str
    access_key: str
    at: float
    fault: str = ""


@dataclass(eq=False)
class Fault:
    """A fault and the requests it applies to.

    kind:
        "slowdown" answers 503 SlowDown, "expired" 400 ExpiredToken, "error" `status` and `code`;
        "odd" gives an answer that no S3 server gives; `code` names an entry of `ODD`;
        "refuse" resets the connection before any answer; "late" only waits for `delay` seconds;
        "slow" sends the body with `rate` bytes a second; "truncate" closes the connection after
        `after` bytes of the body, "reset" does so with a TCP reset, "stall" sends no more but
        keeps it open for `delay` seconds; "corrupt" flips a bit of byte `after` of the body (or
        of its last byte). A body that is shorter than `after` passes whole.
    delay, rate: combine with every kind: the answer is delayed (except for "stall") and throttled.
    method: HTTP method of the requests; "" matches any. path: regular expression searched in path
    and query. only: a further condition on the request. p: probability of the fault per matching
    request, drawn by the proxy's own generator. times: number of requests to break; None for any
    number. seconds: duration of the fault after the first broken request. then: called after the
    fault, before the client can notice it. taken: number of broken requests so far.
    """

    kind: str
    method: str = "GET"
    path: str = ""
    after: int = 0
    delay: float = 0.0
    then: Callable[[], object] | None = None
    only: Callable[[Request], bool] | None = None
    p: float = 1.0
    times: int | None = 1
    seconds: float | None = None
    rate: int = 0
    status: int = 500
    code: str = "InternalError"
    taken: int = field(default=0, init=False)
    _end: float = field(default=float("inf"), init=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault of kind {self.kind!r}; there are {KINDS}")

    def matches(self, request: Request) -> bool:
        return (
            self.method in ("", request.method)
            and re.search(self.path, request.path) is not None
            and (self.only is None or self.only(request))
        )

    def is_over(self) -> bool:
        used_up = self.times is not None and self.taken >= self.times
        return used_up or time.monotonic() > self._end

    def take(self) -> None:
        if self.taken == 0 and self.seconds is not None:
            self._end = time.monotonic() + self.seconds
        self.taken += 1


class FaultProxy:
    """Context manager; `faults` is the script, `requests` the log, `upstream` the server."""

    def __init__(self, upstream: str, seed: int = 0) -> None:
        self.upstream = upstream
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.endpoint = ""
        self._draw = random.Random(seed)
        # asyncio holds tasks by weak references, so a task that waits for the server could be
        # collected.
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        start = asyncio.start_server(self._serve, _HOST, 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(60)
        self.endpoint = f"http://{_HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def count(self, fault: str, method: str = "") -> int:
        """Return how many requests got a fault of that kind ("" counts those without a fault)."""
        return sum(r.fault == fault and method in ("", r.method) for r in self.requests)

    async def _end(self) -> None:
        self._server.close()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, head: bytes) -> Fault | None:
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)

        def header(name: bytes, value: bytes = rb"([^\r]*)") -> str:
            found = re.search(rb"(?i)\r\n" + name + rb": *" + value, head)
            return found[1].decode() if found else ""

        access_key = header(b"authorization", rb"[^\r]*Credential=([^/\r]*)")
        about = (header(b"range"), header(b"if-match"), access_key, time.monotonic())
        request = Request(method, path, *about)
        fault = self._fault(request)
        self.requests.append(Request(method, path, *about, fault.kind if fault else ""))
        return fault

    def _fault(self, request: Request) -> Fault | None:
        for fault in list(self.faults):
            if fault.is_over():
                self._drop(fault)
            elif fault.matches(request) and self._draw.random() < fault.p:
                fault.take()
                if fault.is_over():
                    self._drop(fault)
                return fault
        return None

    def _drop(self, fault: Fault) -> None:
        if fault in self.faults:  # a test may have removed it meanwhile
            self.faults.remove(fault)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            await self._exchange(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the single request of a connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        fault = self._take(head)
        if fault and fault.kind != "stall":
            await asyncio.sleep(fault.delay)
        if fault and fault.kind in ("slowdown", "error", "expired", "odd"):
            writer.write(_odd(fault, head) if fault.kind == "odd" else _error(fault))
            await writer.drain()
            await _done(fault)
            await _linger(reader, writer)
        elif fault and fault.kind == "refuse":
            await _done(fault)
            _reset(writer)
        else:
            # Each request uses its own upstream connection, whose end marks the end of the answer.
            head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)[:-2]
            await self._pass_on(head + b"Connection: close\r\n\r\n", reader, writer, fault)

    async def _pass_on(
        self,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        fault: Fault | None,
    ) -> None:
        address = urlsplit(self.upstream)
        upstream, sink = await asyncio.open_connection(address.hostname, address.port)
        try:
            sink.write(head)
            body = asyncio.ensure_future(_copy(reader, sink))  # the body of a PUT, or nothing
            try:
                if fault is None:
                    await _copy(upstream, writer)
                else:
                    await _answer(upstream, writer, fault)
            finally:
                body.cancel()
        finally:
            sink.close()


def _error(fault: Fault) -> bytes:
    status, code = {
        "slowdown": (503, "SlowDown"),
        "expired": (400, "ExpiredToken"),
        "error": (fault.status, fault.code),
    }[fault.kind]
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    return (
        f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        f"Content-Length: {len(text)}\r\n\r\n{text}"
    ).encode()


def _odd(fault: Fault, head: bytes) -> bytes:
    status, header, body = ODD[fault.code]
    lines = [f"HTTP/1.1 {status}", *([header] if header else []), "Connection: close"]
    lines += [f"Content-Length: {len(body)}", "", "" if head.startswith(b"HEAD ") else body]
    return "\r\n".join(lines).encode()


async def _done(fault: Fault) -> None:
    if fault.then:
        await asyncio.get_running_loop().run_in_executor(None, fault.then)


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the client read the answer; closing before its request has arrived would be a reset."""
    writer.write_eof()
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(-1), 5.0)


def _in_flight(writer: asyncio.StreamWriter) -> bool:
    """Return whether written bytes have not yet reached the client's system."""
    if writer.is_closing():
        return False
    unsent = array.array("i", [0])
    fcntl.ioctl(writer.get_extra_info("socket").fileno(), termios.TIOCOUTQ, unsent)
    return writer.transport.get_write_buffer_size() + unsent[0] > 0


def _reset(writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def _answer(
    upstream: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault
) -> None:
    """Forward an answer with the fault applied."""
    while (head := await upstream.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 1"):
        writer.write(head)  # 100 Continue
    writer.write(head)
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    last = int(length[1]) - 1 if length else fault.after
    cut = fault.after if fault.kind in ("truncate", "reset", "stall") else None
    sent = 0
    while cut is None or sent < cut:
        most = max(1, fault.rate // 20) if fault.rate else 1 << 16
        piece = await upstream.read(most if cut is None else min(most, cut - sent))
        if not piece:
            break
        at = min(fault.after, last) - sent
        if fault.kind == "corrupt" and 0 <= at < len(piece):
            piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
        writer.write(piece)
        await writer.drain()
        sent += len(piece)
        if fault.rate:
            await asyncio.sleep(len(piece) / fault.rate)
    await writer.drain()
    await _done(fault)
    if fault.kind == "stall":
        await asyncio.sleep(fault.delay)
    if fault.kind == "reset" and sent == cut:
        # A reset would discard bytes in flight, so let them arrive first.
        while _in_flight(writer):
            await asyncio.sleep(0.01)
        _reset(writer)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
