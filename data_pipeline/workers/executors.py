"""Executors: a thread of this process, or a worker process that is restarted if it dies.

An executor runs one job at a time and is used by one thread at a time. `ThreadExecutor` calls the
function in that thread. `ProcessExecutor` sends the job to a process (`workers.worker`) and waits.
Jobs are pure functions, so a job whose worker died is retried in a new worker.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from data_pipeline.workers.worker import Worker, WorkerLost, pickled, signals_blocked

Setup = Callable[[], Callable[[Any], Any]]

# A job is not retried after this many workers died with it.
ATTEMPTS = 2


class WorkerDied(RuntimeError):
    """`ATTEMPTS` workers in a row died with the same job: killed, out of memory or crashed."""


class ExecutorClosed(RuntimeError):
    """The executor was closed while it was in use."""


class ThreadExecutor:
    """Runs jobs in the calling thread, which also calls `setup` before the first job."""

    def __init__(self, name: str, setup: Setup):
        self.name = name
        self.lock = threading.Lock()
        self._setup = setup
        self._do: Callable[[Any], Any] | None = None

    def start(self) -> None:
        """Do nothing; `do` calls `setup`, so that the thread that uses files also opens them."""

    def do(self, job: Any, label: Callable[[], str]) -> Any:
        """Run a job; return its result.

        Raises:
            Exception: an exception of `setup` or of the job.
        """
        if self._do is None:
            self._do = self._setup()
        return self._do(job)

    def kill(self) -> None:
        """Do nothing, because a thread cannot be killed."""

    def shutdown(self) -> None:
        """Do nothing; the thread ends after its job."""

    def join(self, deadline: float) -> None:
        """Wait for the running job, at most until the deadline (monotonic clock, s)."""
        if self.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self.lock.release()


class ProcessExecutor:
    """Runs jobs in a worker process.

    Args:
        name: name of the executor in messages.
        setup: called in each new worker; returns the function that runs a job.

    Raises:
        ValueError: `setup` cannot be sent to another process.
    """

    def __init__(self, name: str, setup: Setup):
        self.name = name
        self.lock = threading.Lock()
        self._setup = pickled(setup, lambda: "setup")
        self._changing = threading.Lock()  # guards the attributes below
        self._worker: Worker | None = None
        self._closed = False
        self._killed = False

    def start(self) -> None:
        """Start the worker process without waiting until it is ready."""
        self._running()

    def do(self, job: Any, label: Callable[[], str]) -> Any:
        """Run a job in the worker; `label` names it in messages.

        Raises:
            WorkerDied: two workers in a row died with this job.
            ExecutorClosed: the executor was closed or killed meanwhile.
            ValueError: the job cannot be sent to another process.
            Exception: an exception of `setup` or the job, with its traceback as `__cause__`.
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
        """Close the worker's socket, which makes the worker exit."""
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
        # The socket is closed, so no thread still waits for a reply of this worker.
        if self.lock.acquire(timeout=1.0):
            worker.close()
            self.lock.release()

    def _running(self) -> Worker:
        with self._changing:
            if self._closed or self._killed:
                raise ExecutorClosed(f"{self.name} is closed")
            if self._worker is not None and self._worker.process.poll() is not None:
                self._worker.close()  # it died between jobs, which is no failed attempt of a job
                self._worker = None
            if self._worker is None:
                with signals_blocked():
                    self._worker = Worker(self._setup)
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


Executor = ThreadExecutor | ProcessExecutor
