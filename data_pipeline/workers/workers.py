"""Jobs done ahead by threads or processes, results in the order of the jobs.

    with Workers(setup, num_workers=4) as workers:
        for result in workers.run(jobs, max_bytes=4 << 30, max_jobs=8):
            ...

`setup` is called once in each worker and returns the function that does a job there; so a worker
opens its own files and connections. This module knows nothing of what the jobs are.

`workers.line` keeps order and limits, `workers.hands` does the jobs and replaces
workers that die, `workers.parcel` brings results over from processes. For processes, `setup`
and the jobs have to pickle; the main script is not imported by them, and needs no
`if __name__ == "__main__"`.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Generic, Literal

from data_pipeline.workers.executors import (
    Hand,
    HandClosed,
    Job,
    ProcessHand,
    Result,
    Setup,
    ThreadHand,
    WorkerDied,
    end_all,
)
from data_pipeline.workers.job_queue import Inline, Line, Stats, Tally
from data_pipeline.workers.worker_main import JobError, RemoteTraceback

__all__ = [
    "HandClosed",
    "JobError",
    "RemoteTraceback",
    "Run",
    "Setup",
    "Stats",
    "WorkerDied",
    "Workers",
]

# Idle workers end at once; one in the middle of a job is given this long, then killed.
CLOSE_S = 1.5


class Workers(Generic[Job, Result]):
    """A crew that does jobs ahead of their consumer; `close` it, or use it in a `with`.

    Args:
        setup: called in each worker, before its first job; returns the function that does a job,
            which must be a pure function of the job: one that was lost with its worker is done
            again by another.
        num_workers: 0 for one thread of this process.
        kind: whether `num_workers` counts processes, or threads of this process. Work that holds
            Python's lock gains nothing from threads.
        timeout_s: how long one job may take, together with the start of its worker.
        name: of the workers, in messages.

    Raises:
        ValueError: a number out of range, or `setup` cannot be sent to a process.
    """

    def __init__(
        self,
        setup: Setup[Job, Result],
        num_workers: int,
        *,
        kind: Literal["process", "thread"] = "process",
        timeout_s: float = 1800.0,
        name: str = "worker",
    ):
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; give 0 (a thread) or more")
        if kind not in ("process", "thread"):
            raise ValueError(f"kind is {kind!r}; give 'process' or 'thread'")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; give a time in seconds")
        self.num_workers = num_workers
        self._timeout_s = timeout_s
        self._tally = Tally()
        self._hands: list[Hand[Job, Result]] = []
        if num_workers and kind == "process":
            self._hands += [ProcessHand(f"{name} {i}", setup) for i in range(num_workers)]
        else:
            self._hands += [ThreadHand(f"{name} {i}", setup) for i in range(max(1, num_workers))]
        self._lines: list[Line | Inline] = []  # the present run's; a list, for `_end` to look into
        self._end = weakref.finalize(self, _end, os.getpid(), self._lines, self._hands)
        _in_thread(_start, self._hands)

    @property
    def stats(self) -> Stats:
        """What was done so far, over all runs."""
        restarts = sum(hand.restarts for hand in self._hands)
        return replace(self._tally.stats, restarts=restarts)

    def run(
        self, jobs: Iterable[tuple[Job, int]], *, max_bytes: int, max_jobs: int
    ) -> "Run[Result]":
        """Do jobs ahead, from now on. A former run of these workers ends here.

        Args:
            jobs: (job, estimated bytes of its result and of what it holds while it is done). The
                iterator is advanced in threads of the workers, by one at a time.
            max_bytes: limit of the estimates in flight. A job above it goes alone.
            max_jobs: limit of the jobs in flight; 0, with `num_workers` 0: none ahead, each is done
                in the calling thread when its result is asked for.

        Raises:
            ValueError: a number out of range.
            HandClosed: the workers are closed.
        """
        if max_bytes < 0 or max_jobs < 0:
            raise ValueError(f"max_bytes is {max_bytes}, max_jobs is {max_jobs}; give 0 or more")
        if max_jobs == 0 and self.num_workers:
            raise ValueError(
                f"max_jobs is 0, which leaves nothing to do for {self.num_workers} workers; "
                f"give at least 1, or num_workers=0"
            )
        if not self._end.alive:
            raise HandClosed("the workers are closed")
        for line in self._lines:
            line.stop()
        if max_jobs == 0:
            self._lines[:] = [Inline(iter(jobs), self._hands[0], self._tally)]
        else:
            line = Line(iter(jobs), max_bytes, max_jobs, self._timeout_s, self._tally)
            self._lines[:] = [line]
            _in_thread(_staff, line, self._hands)
        return Run(self, self._lines[0], self._tally)

    def close(self) -> None:
        """End the run and all workers, within two seconds.

        Processes are killed if they are still in a job by then. A thread cannot be: it ends by
        itself with the job it does, whose result is dropped.
        """
        self._end()

    def __enter__(self) -> "Workers[Job, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Run(Generic[Result]):
    """The results of one `Workers.run`, in the order of the jobs. For one thread at a time."""

    def __init__(self, workers: Workers[Any, Result], line: Line | Inline, tally: Tally):
        self._workers = workers  # which would end if nobody held them
        self._line = line
        self._tally = tally

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        """Return the next result. Whatever is raised here ends the run.

        Raises:
            StopIteration: all jobs are done, or the run has ended.
            TimeoutError: naming the job, and where it is.
            WorkerDied: the job cost two workers in a row.
            HandClosed: the workers were closed meanwhile.
            Exception: what the job raised, or the iterator of jobs in its place. From a process,
                its `__cause__` holds the traceback; one that does not pickle becomes a JobError.
        """
        begin = time.monotonic()
        try:
            return self._line.take()
        except BaseException:  # an interrupt too: the result it fell upon is lost
            self.close()
            raise
        finally:
            self._tally.add(wait_s=time.monotonic() - begin)

    def close(self) -> None:
        """End the run: no further job is begun, no further result handed out."""
        self._line.stop()


def _in_thread(target: Callable[..., None], *args: Any) -> None:
    """Start things away from the main thread, where an interrupt could lose what was started."""
    threading.Thread(target=target, args=args, name="workers", daemon=True).start()


def _start(hands: list[Hand[Any, Any]]) -> None:
    """Let workers begin to make ready. What fails here fails again, and is told, at a job."""
    with contextlib.suppress(OSError, HandClosed):
        for hand in hands:
            hand.start()


def _staff(line: Line, hands: list[Hand[Any, Any]]) -> None:
    for hand in hands:
        threading.Thread(target=line.work, args=(hand,), name=hand.name, daemon=True).start()


def _end(owner: int, lines: list[Line | Inline], hands: list[Hand[Any, Any]]) -> None:
    """End what a crew left running: at `close`, when nobody holds it, or when this process ends."""
    if os.getpid() != owner:
        return  # in a forked copy of the owner; the workers are not its own
    for line in lines:
        line.stop()
    end_all(hands, CLOSE_S)
