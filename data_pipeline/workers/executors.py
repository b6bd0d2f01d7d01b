"""Who does a job: this process itself, or one of its own that is replaced if it dies.

A hand does one job at a time and belongs to one thread at a time. `ThreadHand` calls the function
in that thread. `ProcessHand` sends it to a process (`workers.worker`) and waits; jobs are
pure functions, so one that was lost with its worker is given to a fresh one.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from data_pipeline.workers.worker import Lost, Worker, pickled, signals_held

Job = TypeVar("Job")
Result = TypeVar("Result")
_Job = TypeVar("_Job", contravariant=True)
_Result = TypeVar("_Result", covariant=True)
Setup = Callable[[], Callable[[Job], Result]]

# A job that has cost this many workers is not tried again.
ATTEMPTS = 2


class WorkerDied(RuntimeError):
    """A job cost as many workers as it may: they were killed, ran out of memory or crashed."""


class HandClosed(RuntimeError):
    """The hand was closed while it was asked for something."""


class Hand(Protocol[_Job, _Result]):
    """Does jobs, one at a time.

    Attributes:
        name: for messages.
        lock: whoever calls `do` holds it.
    """

    name: str
    lock: threading.Lock

    @property
    def restarts(self) -> int:
        """Workers started in place of dead ones."""
        ...

    def start(self) -> None:
        """Begin to make ready, without waiting for it."""
        ...

    def do(self, job: _Job, label: Callable[[], str]) -> tuple[_Result, float]:
        """Do a job: the result, and the seconds it took. `label` names it in messages."""
        ...

    def give_up(self) -> None:
        """End what `do` is doing, if that can be done; called from another thread."""
        ...

    def hang_up(self) -> None:
        """Close the hand, without waiting for it; called from any thread, any number of times."""
        ...

    def reap(self, deadline: float) -> None:
        """After `hang_up`: wait until a time of the monotonic clock, then use force."""
        ...


class ThreadHand(Generic[Job, Result]):
    """Does jobs in the calling thread. `setup` is called there too, before the first."""

    def __init__(self, name: str, setup: Setup[Job, Result]):
        self.name = name
        self.lock = threading.Lock()
        self._setup = setup
        self._do: Callable[[Job], Result] | None = None

    @property
    def restarts(self) -> int:
        """A thread does not die alone."""
        return 0

    def start(self) -> None:
        """Nothing to begin with: opening things belongs to the thread that uses them."""

    def do(self, job: Job, label: Callable[[], str]) -> tuple[Result, float]:
        """Do a job.

        Raises:
            Exception: what `setup` or the job raised.
        """
        if self._do is None:
            self._do = self._setup()
        begin = time.monotonic()
        result = self._do(job)
        return result, time.monotonic() - begin

    def give_up(self) -> None:
        """A thread cannot be ended from outside."""

    def hang_up(self) -> None:
        """A thread ends with its job."""

    def reap(self, deadline: float) -> None:
        """Wait for the job that is being done, no longer than until the deadline."""
        if self.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self.lock.release()


class ProcessHand(Generic[Job, Result]):
    """Does jobs in a process of its own.

    Args:
        name: for messages.
        setup: called in each worker that is started; returns what does a job.

    Raises:
        ValueError: `setup` cannot be sent to another process.
    """

    def __init__(self, name: str, setup: Setup[Job, Result]):
        self.name = name
        self.lock = threading.Lock()
        self._setup = pickled(setup, lambda: "setup")
        self._changing = threading.Lock()  # guards all below
        self._worker: Worker | None = None
        self._starts = 0
        self._closed = False
        self._given_up = False

    @property
    def restarts(self) -> int:
        """Workers started in place of dead ones."""
        return max(0, self._starts - 1)

    def start(self) -> None:
        """Start the worker process, without waiting until it is ready."""
        self._running()

    def do(self, job: Job, label: Callable[[], str]) -> tuple[Result, float]:
        """Do a job in the worker.

        Raises:
            WorkerDied: two workers in a row were lost with this job.
            HandClosed: the hand was closed or given up meanwhile.
            ValueError: the job cannot be sent to another process.
            Exception: what `setup` or the job raised there, with its traceback as `__cause__`.
        """
        data = pickled(job, label)
        self._given_up = False
        deaths: list[str] = []
        while len(deaths) < ATTEMPTS:
            worker = self._running()
            try:
                return worker.ask(data)
            except Lost:
                deaths.append(self._bury(worker))
        lost = "; its replacement ".join(deaths)
        raise WorkerDied(
            f"{label()} cost {len(deaths)} workers in a row: {self.name} {lost}. See what they "
            f"wrote to stderr; if memory ran out, use fewer workers or a lower limit of bytes"
        )

    def give_up(self) -> None:
        """Kill the worker: the job that it does is lost."""
        with self._changing:
            self._given_up = True
            if self._worker is not None:
                self._worker.kill()

    def hang_up(self) -> None:
        """Close the worker's socket: it ends by itself."""
        with self._changing:
            self._closed = True
            if self._worker is not None:
                self._worker.hang_up()

    def reap(self, deadline: float) -> None:
        """Wait for the worker's end, kill it at the deadline."""
        worker = self._worker
        if worker is None:
            return
        worker.reap(deadline)
        # A thread that asked the worker has its answer now, and one that waited for work has none.
        if self.lock.acquire(timeout=1.0):
            worker.close()
            self.lock.release()

    def _running(self) -> Worker:
        with self._changing:
            if self._closed or self._given_up:
                raise HandClosed(f"{self.name} is closed")
            if self._worker is not None and self._worker.process.poll() is not None:
                self._worker.close()  # it died between two jobs; no job is to blame
                self._worker = None
            if self._worker is None:
                with signals_held():
                    self._worker = Worker(self._setup)
                    self._starts += 1
            return self._worker

    def _bury(self, worker: Worker) -> str:
        """Forget a worker whose socket is closed; return how it ended, or raise HandClosed."""
        worker.reap(time.monotonic() + 1.0)
        worker.close()
        with self._changing:
            self._worker = None
            if self._closed or self._given_up:
                raise HandClosed(f"{self.name} is closed")
        return worker.ending()


def end_all(hands: Sequence[Hand[Any, Any]], patience_s: float) -> None:
    """Close hands and wait for their end, `patience_s` for all together."""
    deadline = time.monotonic() + patience_s
    for hand in hands:
        hand.hang_up()
    for hand in hands:
        hand.reap(deadline)
