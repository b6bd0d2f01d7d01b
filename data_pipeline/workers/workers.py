"""Runs jobs ahead of their consumer in threads or processes; results come in job order.

    with Workers(setup, num_workers=4) as workers:
        for result in workers.run(jobs, max_bytes=4 << 30, max_jobs=8):
            ...

`setup` is called once in each worker and returns the function that runs a job there, so that each
worker opens its own files and connections.

`workers.job_queue` enforces order and limits, `workers.executors` runs the jobs and restarts dead
workers, and `workers.shm_transport` sends results between processes. With processes, `setup` and
the jobs must be picklable. Workers do not import the main script, so it needs no
`if __name__ == "__main__"`.
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

# Idle workers exit at once; a worker that runs a job is killed after this time.
CLOSE_S = 1.5

Job = TypeVar("Job")
Result = TypeVar("Result")


class Workers(Generic[Job, Result]):
    """A pool that runs jobs ahead of their consumer; `close` it, or use it in a `with`.

    Args:
        setup: called in each worker before its first job; returns the function that runs a job.
            That function must be pure, because a job whose worker died is retried in another.
        num_workers: number of processes; 0 for one thread of this process.
        timeout_s: maximum duration of a job, including the start of its worker.
        name: name of the workers in messages.

    Raises:
        ValueError: a number is out of range, or `setup` cannot be sent to a process.
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
        self._queues: list[JobQueue] = []  # queue of the current run, in a list shared with `_end`
        self._end = weakref.finalize(self, _end, os.getpid(), self._queues, self._executors)
        _in_thread(_start, self._executors)

    def run(
        self, jobs: Iterable[tuple[Job, int]], *, max_bytes: int, max_jobs: int
    ) -> "OrderedResults[Result]":
        """Start to run jobs ahead and end the previous run.

        Args:
            jobs: (job, estimated bytes of its result and working memory). The workers' threads
                advance the iterator, one thread at a time.
            max_bytes: limit of the estimated bytes in flight. A larger job runs with no other job.
            max_jobs: limit of the jobs in flight.

        Raises:
            ValueError: a number is out of range.
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
        """End the run and all workers within two seconds.

        A process that still runs a job then is killed. A thread cannot be killed; it ends after its
        job, whose result is dropped.
        """
        self._end()

    def __enter__(self) -> "Workers[Job, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OrderedResults(Generic[Result]):
    """Results of one `Workers.run`, in job order; one thread at a time may use it."""

    def __init__(self, workers: Workers[Any, Result], queue: JobQueue):
        self._workers = workers  # keeps them from being finalised
        self._queue = queue

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        """Return the next result; any exception ends the run.

        Raises:
            StopIteration: all jobs are done, or the run has ended.
            TimeoutError: the job took too long; the message names the job and its executor.
            WorkerDied: two workers in a row died with the job.
            ExecutorClosed: the workers were closed meanwhile.
            Exception: an exception of the job or of the job iterator. For a job in a process,
                `__cause__` holds the traceback, and a JobError replaces an exception that does not
                pickle.
        """
        try:
            return self._queue.take()
        except BaseException:  # including an interrupt, which loses the current result
            self.close()
            raise

    def close(self) -> None:
        """End the run; no further job is started and no further result is returned."""
        self._queue.stop()


def _in_thread(target: Callable[..., None], *args: Any) -> None:
    """Run `target` in another thread; in the main thread, an interrupt could lose its effects."""
    threading.Thread(target=target, args=args, name="workers", daemon=True).start()


def _start(executors: list[Executor]) -> None:
    """Start all workers; the first job raises any error again."""
    with contextlib.suppress(OSError, ExecutorClosed):
        for executor in executors:
            executor.start()


def _start_threads(queue: JobQueue, executors: list[Executor]) -> None:
    for executor in executors:
        threading.Thread(
            target=queue.run_jobs, args=(executor,), name=executor.name, daemon=True
        ).start()


def _end(owner: int, queues: list[JobQueue], executors: list[Executor]) -> None:
    """End the run and the workers, at `close`, garbage collection or process exit."""
    if os.getpid() != owner:
        return  # a forked copy of the owner must not end its workers
    for queue in queues:
        queue.stop()
    for executor in executors:
        executor.shutdown()
    deadline = time.monotonic() + CLOSE_S
    for executor in executors:
        executor.join(deadline)
