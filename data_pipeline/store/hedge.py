"""A second request for a read that is late; whichever is complete first is the answer.

Both ask for the same bytes of the same version, so the answer's bits never change; only the slow
tail does. After "The Tail at Scale" (Dean and Barroso, CACM 2013): a hedge is sent once a read has
taken longer than a high percentile of reads of its size, which costs a few percent more requests.

Nothing here knows what a request is: a `Flight` is anything that can be made, run and abandoned.
"""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

_IDLE_S = 10.0  # a thread without work for so long ends: a store that nobody closed leaks none


class Flight(Protocol):
    """One request on its way. `run` never raises: it leaves what happened in `error`.

    sent: time.monotonic() when the request left, None before that.
    got: bytes that have arrived.
    """

    sent: float | None
    got: int
    error: Exception | None

    def run(self) -> None:
        """Do the request, in the calling thread."""
        ...

    def abandon(self) -> None:
        """Called from another thread: end as soon as possible, nobody wants the answer."""
        ...


F = TypeVar("F", bound=Flight)


class Crew:
    """At most `limit` daemon threads, started when they are needed, ended when they are idle."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = self._free = 0
        self._closed = False

    def start(self, job: Callable[[], None]) -> bool:
        """Run `job` in a thread at once; False if all are busy. A job must not raise."""
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
        """Let the threads end: idle ones now, the others after their job."""
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
                try:  # a job may have been put, counting on this thread, since the time ran out
                    return self._jobs.get_nowait()
                except queue.Empty:
                    self._free -= 1
                    self._threads -= 1
                    return None


class Latencies:
    """How long reads of a size take: recent times by size class (64 KiB, then each doubling)."""

    def __init__(self, share: float, samples: int, window: int = 256) -> None:
        self._share, self._samples, self._window = share, samples, window
        self._lock = threading.Lock()
        self._seconds: dict[int, deque[float]] = {}
        self._known: dict[int, tuple[int, float]] = {}  # noted until the next look, quantile

    def note(self, size: int, seconds: float) -> None:
        """Add the time of one complete read of `size` bytes."""
        kind = max(16, size.bit_length())
        with self._lock:
            times = self._seconds.setdefault(kind, deque(maxlen=self._window))
            times.append(seconds)
            left, value = self._known.get(kind, (0, 0.0))
            if left == 0:  # sorting for every read would cost more than it tells
                ordered = sorted(times)
                left, value = 16, ordered[math.ceil(self._share * len(ordered)) - 1]
            self._known[kind] = (left - 1, value)

    def high(self, size: int) -> float | None:
        """The quantile of reads of that size; None while too few are known."""
        kind = max(16, size.bit_length())
        with self._lock:
            if len(self._seconds.get(kind, ())) < self._samples:
                return None
            return self._known[kind][1]


class Hedger:
    """Decides when a read is late, and lets two flights race.

    Args:
        threads: reads at a time that can be hedged; more than that go without.
        share: hedges per read, at most. Up to 10 unused ones are saved for a bad moment.
        percentile: of recent reads of that size; what takes longer is late.
        floor: seconds below which no read is late.
        samples: reads of a size to be seen before the first hedge.
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
        """Let the threads end."""
        self._crew.close()

    def delay(self, size: int) -> float | None:
        """Seconds after which a read of `size` bytes is late; None: do not hedge it."""
        with self._lock:
            self._credit = min(10.0, self._credit + self._share)
            if self._credit < 1.0:
                return None
        high = self._latencies.high(size)
        return None if high is None else max(self._floor, high)

    def note(self, size: int, seconds: float) -> None:
        """Tell how long a complete read took from the sending of its first request."""
        self._latencies.note(size, seconds)

    def race(
        self, first: F, make: Callable[[], F], delay: float, may: Callable[[], bool]
    ) -> tuple[F, bool]:
        """Run `first`, and a second flight if it is late; (the one to use, was there a second).

        Args:
            make: makes the second flight.
            delay: seconds from the sending of `first` after which it is late.
            may: asked then whether a second request is welcome.
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
    """The flight if it ends within `delay` seconds of its sending, else None."""
    left = delay
    while left > 0:
        try:
            return landed.get(timeout=left)
        except queue.Empty:
            # Before it is sent it waits for the budget, and so would the second.
            left = delay if flight.sent is None else flight.sent + delay - time.monotonic()
    return None


def _better(one: F, other: F) -> F:
    """Of two flights that have ended, of which `one` failed: the one to go on from."""
    return one if other.error is not None and one.got >= other.got else other
