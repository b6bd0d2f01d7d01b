"""Runs jobs ahead of their consumer in threads or processes; results come in job order.

    with Workers(setup, num_workers=4) as workers:
        for result in workers.run(jobs, max_bytes=4 << 30, max_jobs=8):
            ...

`setup` is called once in each worker and returns the function that runs a job there, so that a
worker opens its own files and connections.

`workers.job_queue` keeps order and limits, `workers.executors` runs the jobs and restarts workers
that die, `workers.shm_transport` carries results between processes. For processes, `setup` and the
jobs have to pickle; the main script is not imported, and needs no `if __name__ == "__main__"`.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from data_pipeline.workers.executors import (
    Executor,
    ExecutorClosed,
    ProcessExecutor,
    ThreadExecutor,
    WorkerDied,
)
from data_pipeline.workers.job_queue import JobQueue
from data_pipeline.workers.worker_main import JobError, RemoteTraceback

__all__ = [
    "ExecutorClosed",
    "JobError",
    "RemoteTraceback",
    "OrderedResults",
    "WorkerDied",
    "Workers",
]

# Idle workers exit at once; one that runs a job is killed after this time.
CLOSE_S = 1.5

Job = TypeVar("Job")
Result = TypeVar("Result")


class Workers(Generic[Job, Result]):
    """A pool that runs jobs ahead of their consumer; `close` it, or use it in a `with`.

    Args:
        setup: called in each worker, before its first job; returns the function that runs a job.
            It must be pure: a job that was lost with its worker is retried in another.
        num_workers: processes; 0 for one thread of this process.
        timeout_s: how long one job may take, together with the start of its worker.
        name: of the workers, in messages.

    Raises:
        ValueError: a number out of range, or `setup` cannot be sent to a process.
    """

    def __init__(
        self,
        setup: Callable[[], Callable[[Job], Result]],
        num_workers: int,
        *,
        timeout_s: float = 1800.0,
        name: str = "worker",
    ):
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; give 0 (a thread) or more")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; give a time in seconds")
        self._timeout_s = timeout_s
        self._executors: list[Executor] = [
            ProcessExecutor(f"{name} {i}", setup) for i in range(num_workers)
        ] or [ThreadExecutor(f"{name} 0", setup)]
        self._queues: list[JobQueue] = []  # of the current run; a list, shared with `_end`
        self._end = weakref.finalize(self, _end, os.getpid(), self._queues, self._executors)
        _in_thread(_start, self._executors)

    def run(
        self, jobs: Iterable[tuple[Job, int]], *, max_bytes: int, max_jobs: int
    ) -> "OrderedResults[Result]":
        """Start to run jobs ahead. Ends the previous run.

        Args:
            jobs: (job, estimated bytes of its result and working memory). The iterator is
                advanced in threads of the workers, one at a time.
            max_bytes: limit of the estimates in flight. A larger job runs alone.
            max_jobs: limit of the jobs in flight.

        Raises:
            ValueError: a number out of range.
            ExecutorClosed: the workers are closed.
        """
        if max_bytes < 0 or max_jobs < 1:
            raise ValueError(
                f"max_bytes is {max_bytes}, max_jobs is {max_jobs}; give at least 0 and 1"
            )
        if not self._end.alive:
            raise ExecutorClosed("the workers are closed")
        for queue in self._queues:
            queue.stop()
        queue = JobQueue(iter(jobs), max_bytes, max_jobs, self._timeout_s)
        self._queues[:] = [queue]
        _in_thread(_start_threads, queue, self._executors)
        return OrderedResults(self, queue)

    def close(self) -> None:
        """End the run and all workers, within two seconds.

        A process that still runs a job is then killed. A thread cannot be: it ends after its job,
        whose result is dropped.
        """
        self._end()

    def __enter__(self) -> "Workers[Job, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OrderedResults(Generic[Result]):
    """The results of one `Workers.run`, in the order of the jobs. For one thread at a time."""

    def __init__(self, workers: Workers[Any, Result], queue: JobQueue):
        self._workers = workers  # keeps them from being finalised
        self._queue = queue

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        """Return the next result. Whatever is raised here ends the run.

        Raises:
            StopIteration: all jobs are done, or the run has ended.
            TimeoutError: naming the job, and where it is.
            WorkerDied: two workers in a row died with the job.
            ExecutorClosed: the workers were closed meanwhile.
            Exception: what the job raised, or the iterator of jobs in its place. From a process,
                its `__cause__` holds the traceback; one that does not pickle becomes a JobError.
        """
        try:
            return self._queue.take()
        except BaseException:  # an interrupt too: the current result is lost
            self.close()
            raise

    def close(self) -> None:
        """End the run: no further job is started, no further result returned."""
        self._queue.stop()


def _in_thread(target: Callable[..., None], *args: Any) -> None:
    """Run in another thread: in the main thread an interrupt could lose what was started."""
    threading.Thread(target=target, args=args, name="workers", daemon=True).start()


def _start(executors: list[Executor]) -> None:
    """Begin the setup of all workers. An error here is raised again by the first job."""
    with contextlib.suppress(OSError, ExecutorClosed):
        for executor in executors:
            executor.start()


def _start_threads(queue: JobQueue, executors: list[Executor]) -> None:
    for executor in executors:
        threading.Thread(
            target=queue.run_jobs, args=(executor,), name=executor.name, daemon=True
        ).start()


def _end(owner: int, queues: list[JobQueue], executors: list[Executor]) -> None:
    """End run and workers: at `close`, at garbage collection, or at process exit."""
    if os.getpid() != owner:
        return  # a forked copy of the owner must not end its workers
    for queue in queues:
        queue.stop()
    for executor in executors:
        executor.shutdown()
    deadline = time.monotonic() + CLOSE_S
    for executor in executors:
        executor.join(deadline)
