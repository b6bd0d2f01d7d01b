"""Counts the requests to an S3 server in a proxy that passes them on unchanged.

The proxy relays bytes on the loopback interface. A request begins with its method, at the start of
the client's data or right after the blank line that ends the previous request, because loaders send
no bodies. The Host header is unchanged, so signatures still verify. Counting takes time, so counted
passes are not timed.
"""

import asyncio
import re
import threading
from collections import Counter
from types import TracebackType
from urllib.parse import urlsplit

_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1\.1\r\n")
_HOST = "127.0.0.1"


class CountingProxy:
    """Context manager whose `requests` counts (method, path) since the last `clear`."""

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        self._upstream = (str(address.hostname), int(address.port or 80))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.requests: Counter[tuple[str, str]] = Counter()
        self.bytes = 0
        self.endpoint = ""

    def __enter__(self) -> "CountingProxy":
        self._thread.start()
        starting = asyncio.start_server(self._serve, _HOST, 0)
        server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)
        self.endpoint = f"http://{_HOST}:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def clear(self) -> None:
        """Reset the counts."""
        self.requests.clear()
        self.bytes = 0

    def counts(self, shards: tuple[str, ...]) -> dict[str, int]:
        """Return the number of GETs of objects with these endings, and of all other requests."""
        found = {"shards": 0, "other": 0}
        for (method, path), number in self.requests.items():
            found["shards" if method == "GET" and path.endswith(shards) else "other"] += number
        return found

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.close()
            return
        asking = self._relay(reader, far_writer, self._count_requests)
        answering = self._relay(far_reader, writer, self._count_bytes)
        await asyncio.gather(asking, answering)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen) -> None:
        try:
            while data := await source.read(1 << 18):
                seen(data)
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()

    def _count_requests(self, data: bytes) -> None:
        for method, path in _REQUEST.findall(data):
            self.requests[method.decode(), path.decode().split("?")[0]] += 1

    def _count_bytes(self, data: bytes) -> None:
        self.bytes += len(data)
