"""Bandwidth limit, stop signal and byte counters shared by all threads of a sync."""

import threading
import time
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called, from any thread, with (bytes done, bytes in total)."""


class Stopped(Exception):
    """Another part of the sync failed, or the user interrupted it."""


class Rate:
    """Bandwidth limit: threads call `take` before they move bytes.

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
        """Wait until the limit allows another `size` bytes.

        Raises:
            Stopped: `stop` was called.
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
    """Counts the bytes to move or compare, and the bytes done."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._lock = progress, threading.Lock()
        self._done = self._total = 0

    def expect(self, size: int) -> None:
        """Add bytes to the expected total."""
        with self._lock:
            self._total += size

    def add(self, size: int) -> None:
        """Count bytes as done; a negative size takes back bytes that must be sent again."""
        with self._lock:
            self._done += size
            self._progress(self._done, self._total)
