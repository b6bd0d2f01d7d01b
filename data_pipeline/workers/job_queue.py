"""Bounded, ordered job queue: admits jobs within limits and returns results in job order.

    jobs --admit--> in flight: running or done --take--> consumer
             |      (bytes and number limited)   |
             +---------- freed by take <---------+

A free executor admits the next job once its estimated bytes fit within the limit together with the
jobs in flight, so results that are not taken cause back-pressure. The order of results does not
depend on which executor runs a job, or when.

KeyboardInterrupt can be raised at any line of the main thread, even inside `threading.Condition`,
which may then stay locked. Therefore the consumer only uses primitives written in C, which cannot
be interrupted midway: plain locks in a `with`, and `SimpleQueue`.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.workers.executors import Executor
from data_pipeline.workers.worker_main import raisable


@dataclass
class AdmittedJob:
    """A job in flight.

    Attributes:
        index: number of the job in the run, from 0.
        job: the job.
        executor: executor that runs the job.
        begun: time of admission (monotonic clock, s).
    """

    index: int
    job: Any
    executor: Executor
    begun: float

    def label(self) -> str:
        """Return the name of the job for messages."""
        try:
            shown = repr(self.job)
        except Exception:  # a broken repr must not fail the job
            shown = type(self.job).__name__
        return f"job {self.index} ({shown if len(shown) <= 200 else shown[:197] + '...'})"


@dataclass
class _Outcome:
    result: Any
    error: Exception | None


class JobQueue:
    """The jobs of one run, executed ahead of the consumer.

    Args:
        jobs: (job, estimated bytes).
        max_bytes: limit of the estimated bytes in flight; a larger job runs with no other job.
        max_jobs: limit of the jobs in flight.
        timeout_s: maximum duration of a job.
    """

    def __init__(
        self,
        jobs: Iterator[tuple[Any, int]],
        max_bytes: int,
        max_jobs: int,
        timeout_s: float,
    ):
        self._jobs = jobs
        self._max_bytes = max_bytes
        self._max_jobs = max_jobs
        self._timeout_s = timeout_s
        # One thread at a time advances the iterator, which defines the order of the jobs.
        self._jobs_lock = threading.Lock()
        self._asked = 0
        self._wake_consumer: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Guards the attributes below; held only for short operations.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # wakes executors
        self._stopped = False
        # Index after the last outcome, once known. After several errors, any of their indices will
        # do, because the consumer stops at the first error.
        self._end: int | None = None
        self._next = 0  # index of the next result to take
        self._in_flight_bytes: dict[int, int] = {}  # index -> estimated bytes, from admit to take
        self._running: dict[int, AdmittedJob] = {}  # index -> job
        self._done: dict[int, _Outcome] = {}

    def run_jobs(self, executor: Executor) -> None:
        """Run jobs on an executor until the run is over; called as the target of a thread."""
        with executor.lock:  # the executor may still run a job of the previous run
            while (admitted := self._admit(executor)) is not None:
                self._do(admitted)
                del admitted  # otherwise it stays in memory while waiting for the next job

    def take(self) -> Any:
        """Wait for the next outcome in order; return its result or raise its error.

        Raises:
            StopIteration: there are no more results, or the queue was stopped.
            TimeoutError: the job took too long; the message names the job and its executor.
            Exception: an exception of the job.
        """
        index, begin = self._next, time.monotonic()
        while True:
            with self._lock:
                if index in self._done:
                    outcome = self._done.pop(index)
                    self._in_flight_bytes.pop(index, None)
                    self._next += 1
                    self._changed.notify_all()
                    break
                if self._stopped or (self._end is not None and index >= self._end):
                    raise StopIteration
                admitted = self._running.get(index)
            since = begin if admitted is None else max(begin, admitted.begun)
            left = since + self._timeout_s - time.monotonic()
            if left <= 0:
                self._time_out(index, admitted)
            with contextlib.suppress(queue.Empty):
                self._wake_consumer.get(timeout=left)
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    def stop(self) -> None:
        """Drop all outcomes and admit no more jobs."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._done.clear()
                self._in_flight_bytes.clear()
                self._changed.notify_all()
                self._wake_consumer.put(None)

    def _admit(self, executor: Executor) -> AdmittedJob | None:
        """Wait for room and admit the next job for an executor; return None if the run is over."""
        with self._jobs_lock:
            with self._lock:
                if not self._room(lambda: len(self._in_flight_bytes) < self._max_jobs):
                    return None
            index = self._asked
            try:
                job, nbytes = next(self._jobs)
                if nbytes < 0:
                    raise ValueError(f"job {index} is estimated at {nbytes} bytes")
            except StopIteration:
                self._deliver(index, None)
                return None
            except BaseException as error:
                self._deliver(index, _Outcome(None, raisable(error)))
                return None
            self._asked += 1
            with self._lock:
                room = self._max_bytes - nbytes
                held = self._in_flight_bytes
                if not self._room(lambda: not held or sum(held.values()) <= room):
                    return None
                admitted = AdmittedJob(index, job, executor, time.monotonic())
                self._running[index] = admitted
                self._in_flight_bytes[index] = nbytes
                self._wake_consumer.put(None)  # so that a consumer timeout names this job
                return admitted

    def _do(self, admitted: AdmittedJob) -> None:
        try:
            result = admitted.executor.do(admitted.job, admitted.label)
        except BaseException as error:
            self._deliver(admitted.index, _Outcome(None, raisable(error)))
        else:
            self._deliver(admitted.index, _Outcome(result, None))

    def _deliver(self, index: int, outcome: _Outcome | None) -> None:
        """Store the outcome of a job; None or an error ends the run at this job."""
        with self._lock:
            self._running.pop(index, None)
            if outcome is not None and not self._stopped:
                self._done[index] = outcome
            if outcome is None or outcome.error is not None:
                self._end = index if outcome is None else index + 1
                self._changed.notify_all()
            self._wake_consumer.put(None)

    def _room(self, room: Callable[[], bool]) -> bool:
        """Wait for room; return False if the run is over. The caller holds the lock."""
        self._changed.wait_for(lambda: self._over() or room())
        return not self._over()

    def _over(self) -> bool:
        return self._stopped or self._end is not None

    def _time_out(self, index: int, admitted: AdmittedJob | None) -> None:
        waited = f"waited {self._timeout_s:g} s for "
        if admitted is None:
            raise TimeoutError(
                f"{waited}job {index}: the iterator of jobs has not given it, or no worker was free"
            )
        admitted.executor.kill()
        raise TimeoutError(
            f"{waited}{admitted.label()}: {admitted.executor.name} is still at it; raise the "
            f"timeout if jobs may take so long, else see what they wait for"
        )
