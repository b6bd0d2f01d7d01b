"""Hedged reads: sends a second request for a late read and uses whichever completes first.

Both requests read the same bytes of the same version, so hedging changes only the latency tail, not
the result. Following "The Tail at Scale" (Dean and Barroso, CACM 2013), a hedge is sent when a read
takes longer than a high percentile of reads of its size, which costs a few percent more requests.

The module is independent of the request type: a `Flight` is anything with `run` and `abandon`.
"""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

_IDLE_S = 10.0  # idle threads end after this time, so a store that is not closed leaks none


class Flight(Protocol):
    """One request in progress. `run` never raises; it stores an exception in `error`.

    sent: time.monotonic() when the request was sent; None before that.
    got: number of bytes received.
    """

    sent: float | None
    got: int
    error: Exception | None

    def run(self) -> None:
        """Run the request in the calling thread."""
        ...

    def abandon(self) -> None:
        """End as soon as possible without a result; called from another thread."""
        ...


F = TypeVar("F", bound=Flight)


class Crew:
    """Pool of at most `limit` daemon threads that start on demand and end when idle."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = self._free = 0
        self._closed = False

    def start(self, job: Callable[[], None]) -> bool:
        """Run `job` in a thread now; return False if all are busy. A job must not raise."""
        with self._lock:
            if self._closed:
                return False
            if self._free:
                self._free -= 1
            elif self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            else:
                return False
            self._jobs.put(job)
        return True

    def close(self) -> None:
        """End idle threads now and busy threads after their job."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # an idle thread must not keep a body alive
            with self._lock:
                self._free += 1

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._jobs.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                try:  # a job for this thread may have been queued since the timeout
                    return self._jobs.get_nowait()
                except queue.Empty:
                    self._free -= 1
                    self._threads -= 1
                    return None


class Latencies:
    """Recent read times by size class (up to 64 KiB, then one class per doubling)."""

    def __init__(self, share: float, samples: int, window: int = 256) -> None:
        self._share, self._samples, self._window = share, samples, window
        self._lock = threading.Lock()
        self._seconds: dict[int, deque[float]] = {}
        self._known: dict[int, tuple[int, float]] = {}  # reads until the next update, quantile

    def note(self, size: int, seconds: float) -> None:
        """Record the time of one complete read of `size` bytes."""
        kind = max(16, size.bit_length())
        with self._lock:
            times = self._seconds.setdefault(kind, deque(maxlen=self._window))
            times.append(seconds)
            left, value = self._known.get(kind, (0, 0.0))
            if left == 0:  # sorting for every read would be too expensive
                ordered = sorted(times)
                left, value = 16, ordered[math.ceil(self._share * len(ordered)) - 1]
            self._known[kind] = (left - 1, value)

    def high(self, size: int) -> float | None:
        """Return the quantile of read times for that size; None while there are too few reads."""
        kind = max(16, size.bit_length())
        with self._lock:
            if len(self._seconds.get(kind, ())) < self._samples:
                return None
            return self._known[kind][1]


class Hedger:
    """Hedging policy: decides when a read is late, and races two flights.

    Args:
        threads: number of concurrent reads that can be hedged; further reads are not hedged.
        share: maximum number of hedges per read. Up to 10 unused hedges are saved.
        percentile: percentile of recent read times of that size, above which a read is late.
        floor: seconds below which no read is late.
        samples: number of reads of a size before the first hedge.
    """

    def __init__(
        self,
        threads: int,
        share: float = 0.05,
        percentile: float = 0.95,
        floor: float = 0.05,
        samples: int = 64,
    ) -> None:
        self._crew = Crew(2 * threads, "hedged-read")
        self._latencies = Latencies(percentile, samples)
        self._share, self._floor = share, floor
        self._lock = threading.Lock()
        self._credit = 0.0

    def close(self) -> None:
        """End the threads."""
        self._crew.close()

    def delay(self, size: int) -> float | None:
        """Return the seconds after which a read of `size` bytes is late; None disables hedging."""
        with self._lock:
            self._credit = min(10.0, self._credit + self._share)
            if self._credit < 1.0:
                return None
        high = self._latencies.high(size)
        return None if high is None else max(self._floor, high)

    def note(self, size: int, seconds: float) -> None:
        """Record the duration of a complete read from the sending of its first request."""
        self._latencies.note(size, seconds)

    def race(
        self, first: F, make: Callable[[], F], delay: float, may: Callable[[], bool]
    ) -> tuple[F, bool]:
        """Run `first`, and a second flight if it is late.

        Args:
            first: the first flight.
            make: makes the second flight.
            delay: seconds from the sending of `first` after which it is late.
            may: called then; returns whether a second request is allowed.

        Returns:
            The flight to use, and whether a second flight ran.
        """
        landed: queue.SimpleQueue[F] = queue.SimpleQueue()
        if not self._launch(first, landed):
            first.run()
            return first, False
        flights = [first]
        try:
            flight = _wait(landed, first, delay)
            if flight is not None:
                return flight, False
            if may() and self._spend():
                second = make()
                if self._launch(second, landed):
                    flights.append(second)
            winner = landed.get()
            if winner.error is not None and len(flights) == 2:
                winner = _better(winner, landed.get())
            return winner, len(flights) == 2
        finally:
            for flight in flights:
                flight.abandon()

    def _launch(self, flight: F, landed: "queue.SimpleQueue[F]") -> bool:
        def job() -> None:
            try:
                flight.run()
            finally:
                landed.put(flight)

        return self._crew.start(job)

    def _spend(self) -> bool:
        with self._lock:
            if self._credit < 1.0:
                return False
            self._credit -= 1.0
            return True


def _wait(landed: "queue.SimpleQueue[F]", flight: F, delay: float) -> F | None:
    """Return the flight if it ends within `delay` seconds of its sending, else None."""
    left = delay
    while left > 0:
        try:
            return landed.get(timeout=left)
        except queue.Empty:
            # An unsent flight waits for the budget; a second one would wait too.
            left = delay if flight.sent is None else flight.sent + delay - time.monotonic()
    return None


def _better(one: F, other: F) -> F:
    """Return the better of two ended flights, of which `one` failed."""
    return one if other.error is not None and one.got >= other.got else other
