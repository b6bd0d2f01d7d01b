"""One run of jobs: admitted within limits at one end, their outcomes taken in order at the other.

    jobs --admit--> in flight: being done, done --take--> consumer
             |      (bytes and number limited)    |
             +----------- room again <------------+

Whichever hand is free admits the next job, as long as the bytes that the job is estimated to need
fit beside those in flight; so results that nobody takes are back-pressure. Which hand does a job,
and when, never shows in the order.

An interrupt is raised in the main thread, at any line, also inside of `threading.Condition`, which
may then be left locked. So the consumer uses only what is written in C, where that cannot be: plain
locks in a `with`, and a queue.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from data_pipeline.workers.executors import Hand
from data_pipeline.workers.worker_main import raisable


@dataclass(frozen=True)
class Stats:
    """What workers did so far.

    Attributes:
        jobs: done.
        busy_s: seconds the jobs took, summed over workers.
        wait_s: seconds the consumer waited for results.
        restarts: workers started in place of dead ones.
        bytes_in_flight: estimated bytes of the jobs in flight now.
        high_water_bytes: the most there ever were.
    """

    jobs: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    restarts: int = 0
    bytes_in_flight: int = 0
    high_water_bytes: int = 0


class Tally:
    """Running totals, from any thread."""

    def __init__(self) -> None:
        self.stats = Stats()
        self._lock = threading.Lock()

    def add(self, **more: float) -> None:
        """Add to some of the totals."""
        with self._lock:
            now = self.stats
            self.stats = replace(now, **{k: getattr(now, k) + v for k, v in more.items()})

    def flying(self, nbytes: int) -> None:
        """Note how many bytes are in flight now."""
        with self._lock:
            high = max(self.stats.high_water_bytes, nbytes)
            self.stats = replace(self.stats, bytes_in_flight=nbytes, high_water_bytes=high)


@dataclass
class Ticket:
    """A job in flight.

    Attributes:
        place: in the run, from 0.
        job: itself.
        hand: who does it.
        begun: when it was admitted, on the monotonic clock.
    """

    place: int
    job: Any
    hand: Hand[Any, Any]
    begun: float

    def label(self) -> str:
        """Name the job for a message."""
        try:
            shown = repr(self.job)
        except Exception:  # only a name for messages
            shown = type(self.job).__name__
        return f"job {self.place} ({shown if len(shown) <= 200 else shown[:197] + '...'})"

    def do(self) -> tuple[Any, float]:
        """Have the hand do it: the result, and the seconds it took."""
        return self.hand.do(self.job, self.label)


@dataclass
class _Outcome:
    result: Any
    error: Exception | None


class Line:
    """One run with jobs in flight.

    Args:
        jobs: (job, estimated bytes).
        max_bytes: limit of the estimates in flight; a job above it goes alone.
        max_jobs: limit of the jobs in flight.
        timeout_s: how long a job may take.
        tally: what to count in.
    """

    def __init__(
        self,
        jobs: Iterator[tuple[Any, int]],
        max_bytes: int,
        max_jobs: int,
        timeout_s: float,
        tally: Tally,
    ):
        self._jobs = jobs
        self._max_bytes = max_bytes
        self._max_jobs = max_jobs
        self._timeout_s = timeout_s
        self._tally = tally
        # One thread at a time asks the iterator, which gives the jobs their order.
        self._asking = threading.Lock()
        self._asked = 0
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes the consumer
        # Guards all below. Nothing that may take long happens under it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # wakes hands
        self._stopped = False
        # The place after the last outcome, once it is known. Of several errors any will do: the
        # consumer stops at the first.
        self._end: int | None = None
        self._next = 0  # the place to be taken next
        self._flying: dict[int, int] = {}  # place -> estimated bytes, from admit to take
        self._tickets: dict[int, Ticket] = {}  # being done
        self._done: dict[int, _Outcome] = {}

    def work(self, hand: Hand[Any, Any]) -> None:
        """Do jobs with a hand until there are no more; the target of a thread."""
        with hand.lock:  # it may still be busy with a job of the run before
            while (ticket := self._admit(hand)) is not None:
                self._do(ticket)
                del ticket  # or it would be held while the next one is waited for

    def take(self) -> Any:
        """Wait for the next outcome in order; return its result or raise its error.

        Raises:
            StopIteration: there are no more, or the line was stopped.
            TimeoutError: naming the job, and who has it.
            Exception: what the job raised.
        """
        place, begin = self._next, time.monotonic()
        while True:
            with self._lock:
                if place in self._done:
                    outcome = self._pop(place)
                    break
                if self._stopped or (self._end is not None and place >= self._end):
                    raise StopIteration
                ticket = self._tickets.get(place)
            since = begin if ticket is None else max(begin, ticket.begun)
            left = since + self._timeout_s - time.monotonic()
            if left <= 0:
                self._give_up(place, ticket)
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=left)
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    def stop(self) -> None:
        """Drop all outcomes, admit nothing more."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._done.clear()
                self._flying.clear()
                self._tally.flying(0)
                self._changed.notify_all()
                self._news.put(None)

    def _pop(self, place: int) -> _Outcome:
        """Take an outcome away; the lock is held."""
        self._flying.pop(place, None)
        self._next += 1
        self._tally.flying(self._in_flight())
        self._changed.notify_all()
        return self._done.pop(place)

    def _admit(self, hand: Hand[Any, Any]) -> Ticket | None:
        """Wait for room and take the next job for a hand; None: nothing more is to be begun."""
        with self._asking:
            with self._lock:
                if not self._room(lambda: len(self._flying) < self._max_jobs):
                    return None
            place = self._asked
            try:
                job, nbytes = next(self._jobs)
                if nbytes < 0:
                    raise ValueError(f"job {place} is estimated at {nbytes} bytes")
            except StopIteration:
                self._deliver(place, None)
                return None
            except BaseException as error:
                self._deliver(place, _Outcome(None, raisable(error)))
                return None
            self._asked += 1
            with self._lock:
                if not self._room(lambda: not self._flying or self._fits(nbytes)):
                    return None
                ticket = Ticket(place, job, hand, time.monotonic())
                self._tickets[place] = ticket
                self._flying[place] = nbytes
                self._tally.flying(self._in_flight())
                self._news.put(None)  # whoever waits for it knows now whom to blame
                return ticket

    def _do(self, ticket: Ticket) -> None:
        try:
            result, seconds = ticket.do()
        except BaseException as error:
            self._deliver(ticket.place, _Outcome(None, raisable(error)))
        else:
            self._tally.add(jobs=1, busy_s=seconds)
            self._deliver(ticket.place, _Outcome(result, None))

    def _deliver(self, place: int, outcome: _Outcome | None) -> None:
        """Put an outcome in its place; None or an error ends the run there."""
        with self._lock:
            self._tickets.pop(place, None)
            if outcome is not None and not self._stopped:
                self._done[place] = outcome
            if outcome is None or outcome.error is not None:
                self._end = place if outcome is None else place + 1
                self._changed.notify_all()
            self._news.put(None)

    def _room(self, room: Callable[[], bool]) -> bool:
        """Wait for room; False: nothing more is to be begun. The lock is held."""
        self._changed.wait_for(lambda: self._over() or room())
        return not self._over()

    def _over(self) -> bool:
        return self._stopped or self._end is not None

    def _fits(self, nbytes: int) -> bool:
        return self._in_flight() + nbytes <= self._max_bytes

    def _in_flight(self) -> int:
        return sum(self._flying.values())

    def _give_up(self, place: int, ticket: Ticket | None) -> None:
        waited = f"waited {self._timeout_s:g} s for "
        if ticket is None:
            raise TimeoutError(
                f"{waited}job {place}: the iterator of jobs has not given it, or no worker was free"
            )
        ticket.hand.give_up()
        raise TimeoutError(
            f"{waited}{ticket.label()}: {ticket.hand.name} is still at it; raise the timeout if "
            f"jobs may take so long, else see what they wait for"
        )


class Inline:
    """One run with nothing in flight: a job is done when its result is asked for."""

    def __init__(self, jobs: Iterator[tuple[Any, int]], hand: Hand[Any, Any], tally: Tally):
        self._jobs = jobs
        self._hand = hand
        self._tally = tally
        self._next = 0
        self._stopped = False

    def take(self) -> Any:
        """Take the next job, do it, return its result.

        Raises:
            StopIteration: there are no more, or the line was stopped.
            Exception: what the job raised.
        """
        if self._stopped:
            raise StopIteration
        job, nbytes = next(self._jobs)
        ticket = Ticket(self._next, job, self._hand, time.monotonic())
        self._next += 1
        self._tally.flying(nbytes)
        try:
            with self._hand.lock:
                result, seconds = ticket.do()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # in the consumer's own thread, it is his
                raise
            raise raisable(error) from None
        finally:
            self._tally.flying(0)
        self._tally.add(jobs=1, busy_s=seconds)
        return result

    def stop(self) -> None:
        """Take nothing more."""
        self._stopped = True
