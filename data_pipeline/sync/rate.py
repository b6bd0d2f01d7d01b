"""What all threads of a sync share: a limit of bytes a second, the sign to stop, and a count."""

import threading
import time
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called, from any thread, with (bytes done, bytes in all)."""


class Stopped(Exception):
    """Another part of the sync failed, or the user has interrupted it."""


class Rate:
    """Whoever wants to move bytes asks first; answers come so that their sum keeps to the limit.

    Args:
        bytes_per_second: of all threads together; None: no limit.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"bandwidth is {bytes_per_second}; allowed: above 0")
        self._rate = bytes_per_second
        self._lock, self._free_at = threading.Lock(), 0.0
        self._stop = threading.Event()

    def stop(self) -> None:
        """End all waits; from now on `take` raises Stopped."""
        self._stop.set()

    def take(self, size: int) -> None:
        """Wait until `size` bytes may go.

        Raises:
            Stopped: the sync is to end.
        """
        if self._rate is not None:
            with self._lock:
                now = time.monotonic()
                begin = max(now, self._free_at)
                self._free_at = begin + size / self._rate
            self._stop.wait(begin - now)
        if self._stop.is_set():
            raise Stopped


class Meter:
    """Counts bytes that are to be moved or compared, and those that were."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock = progress, threading.Lock()
        self._done = self._total = 0

    def expect(self, size: int) -> None:
        """So many more bytes are to come."""
        with self._lock:
            self._total += size

    def add(self, size: int) -> None:
        """So many more have come; a negative number takes back what has to come again."""
        with self._lock:
            self._done += size
            self._progress(self._done, self._total)
