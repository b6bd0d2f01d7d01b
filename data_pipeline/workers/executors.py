"""Executors: a thread of this process, or a worker process that is restarted if it dies.

An executor runs one job at a time and is used by one thread at a time. `ThreadExecutor` calls the
function in that thread. `ProcessExecutor` sends the job to a process (`workers.worker`) and waits.
Jobs are pure functions, so a job that was lost with its worker is retried in a new one.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from data_pipeline.workers.worker import Worker, WorkerLost, pickled, signals_blocked

Job = TypeVar("Job")
Result = TypeVar("Result")
_Job = TypeVar("_Job", contravariant=True)
_Result = TypeVar("_Result", covariant=True)
Setup = Callable[[], Callable[[Job], Result]]

# A job is not retried after this many workers died with it.
ATTEMPTS = 2


class WorkerDied(RuntimeError):
    """`ATTEMPTS` workers in a row died with the same job: killed, out of memory or crashed."""


class ExecutorClosed(RuntimeError):
    """The executor was closed while it was in use."""


class Executor(Protocol[_Job, _Result]):
    """Runs jobs, one at a time.

    Attributes:
        name: for messages.
        lock: held by the caller of `do`.
    """

    name: str
    lock: threading.Lock

    @property
    def restarts(self) -> int:
        """Workers started in place of dead ones."""
        ...

    def start(self) -> None:
        """Begin the setup; does not wait for it."""
        ...

    def do(self, job: _Job, label: Callable[[], str]) -> tuple[_Result, float]:
        """Run a job; return its result and duration in seconds. `label` names it in messages."""
        ...

    def kill(self) -> None:
        """Abort the running `do` where possible; called from another thread."""
        ...

    def shutdown(self) -> None:
        """Close the executor without waiting; from any thread, idempotent."""
        ...

    def join(self, deadline: float) -> None:
        """After `shutdown`: wait until `deadline` (monotonic clock, s), then kill."""
        ...


class ThreadExecutor(Generic[Job, Result]):
    """Runs jobs in the calling thread. `setup` is called there too, before the first one."""

    def __init__(self, name: str, setup: Setup[Job, Result]):
        self.name = name
        self.lock = threading.Lock()
        self._setup = setup
        self._do: Callable[[Job], Result] | None = None

    @property
    def restarts(self) -> int:
        """Always 0: a thread does not die alone."""
        return 0

    def start(self) -> None:
        """Do nothing: the thread that uses files and connections opens them."""

    def do(self, job: Job, label: Callable[[], str]) -> tuple[Result, float]:
        """Run a job.

        Raises:
            Exception: what `setup` or the job raised.
        """
        if self._do is None:
            self._do = self._setup()
        begin = time.monotonic()
        result = self._do(job)
        return result, time.monotonic() - begin

    def kill(self) -> None:
        """Do nothing: a thread cannot be ended from outside."""

    def shutdown(self) -> None:
        """Do nothing: a thread ends with its job."""

    def join(self, deadline: float) -> None:
        """Wait for the running job, at most until the deadline."""
        if self.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self.lock.release()


class ProcessExecutor(Generic[Job, Result]):
    """Runs jobs in a worker process.

    Args:
        name: for messages.
        setup: called in each worker that is started; returns the function that runs a job.

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
        self._killed = False

    @property
    def restarts(self) -> int:
        """Workers started in place of dead ones."""
        return max(0, self._starts - 1)

    def start(self) -> None:
        """Start the worker process; does not wait until it is ready."""
        self._running()

    def do(self, job: Job, label: Callable[[], str]) -> tuple[Result, float]:
        """Run a job in the worker.

        Raises:
            WorkerDied: two workers in a row died with this job.
            ExecutorClosed: the executor was closed or killed meanwhile.
            ValueError: the job cannot be sent to another process.
            Exception: what `setup` or the job raised there, with its traceback as `__cause__`.
        """
        data = pickled(job, label)
        self._killed = False
        deaths: list[str] = []
        while len(deaths) < ATTEMPTS:
            worker = self._running()
            try:
                return worker.call(data)
            except WorkerLost:
                deaths.append(self._discard(worker))
        lost = "; its replacement ".join(deaths)
        raise WorkerDied(
            f"{label()} cost {len(deaths)} workers in a row: {self.name} {lost}. See what they "
            f"wrote to stderr; if memory ran out, use fewer workers or a lower limit of bytes"
        )

    def kill(self) -> None:
        """Kill the worker; its running job is lost."""
        with self._changing:
            self._killed = True
            if self._worker is not None:
                self._worker.kill()

    def shutdown(self) -> None:
        """Close the worker's socket, upon which the worker exits."""
        with self._changing:
            self._closed = True
            if self._worker is not None:
                self._worker.shutdown()

    def join(self, deadline: float) -> None:
        """Wait for the worker to exit; kill it at the deadline."""
        worker = self._worker
        if worker is None:
            return
        worker.join(deadline)
        # No thread still waits for an answer of this worker: its socket is closed.
        if self.lock.acquire(timeout=1.0):
            worker.close()
            self.lock.release()

    def _running(self) -> Worker:
        with self._changing:
            if self._closed or self._killed:
                raise ExecutorClosed(f"{self.name} is closed")
            if self._worker is not None and self._worker.process.poll() is not None:
                self._worker.close()  # it died between two jobs: not counted as an attempt of a job
                self._worker = None
            if self._worker is None:
                with signals_blocked():
                    self._worker = Worker(self._setup)
                    self._starts += 1
            return self._worker

    def _discard(self, worker: Worker) -> str:
        """Drop a worker whose socket is closed; describe its exit, or raise ExecutorClosed."""
        worker.join(time.monotonic() + 1.0)
        worker.close()
        with self._changing:
            self._worker = None
            if self._closed or self._killed:
                raise ExecutorClosed(f"{self.name} is closed")
        return worker.exit_text()


def shutdown_all(executors: Sequence[Executor[Any, Any]], patience_s: float) -> None:
    """Close executors and wait for their exit, `patience_s` for all together."""
    deadline = time.monotonic() + patience_s
    for executor in executors:
        executor.shutdown()
    for executor in executors:
        executor.join(deadline)
