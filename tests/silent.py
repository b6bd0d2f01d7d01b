"""Server that accepts connections and never answers, and an endpoint that refuses connections."""

import socket
import threading
from types import TracebackType

_REFUSING: list[socket.socket] = []
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


class SilentServer:
    """Listens on the loopback; the first connection sets `asked`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked = threading.Event()
        self._held: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            try:
                self._held.append(self._listener.accept()[0])
            except OSError:
                return
            self.asked.set()

    def __enter__(self) -> "SilentServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in (self._listener, *self._held):
            one.close()


def refusing() -> str:
    """Return an endpoint that refuses connections, on a port with no listener."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    _REFUSING.append(held)
    return f"http://127.0.0.1:{held.getsockname()[1]}"
