"""A function over many tasks in other processes, results in the order of the tasks.

Processes and not threads: much of what is done to a sample is Python, which threads would share one
core for. No more than a few tasks are under way, so a slow reader of the results holds the work up,
and memory stays bounded.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

# Set in each worker by `_begin`: what `_call` applies to its tasks.
_function: Callable[..., Any] | None = None


class WorkerDied(Exception):
    """A worker process ended without an answer."""


def ordered_map(
    build: Callable[..., Callable[[Task], Result]],
    arguments: tuple[Any, ...],
    tasks: Iterable[Task],
    workers: int,
) -> Generator[Result, None, None]:
    """Yield the results of tasks in their order.

    Args:
        build: called as `build(*arguments)` once in each process, gives the function; both must be
            picklable. What is expensive to build or to send is sent once, not with every task.
        arguments: see there.
        tasks: read from this process, only a few more than there are workers ahead of the results.
        workers: processes; 0 does the work here.

    Raises:
        WorkerDied: a worker was killed, or crashed.
    """
    if workers < 0:
        raise ValueError(f"workers {workers}: give 0 (none) or more")
    if not workers:
        yield from map(build(*arguments), tasks)
        return
    # Spawned, not forked: the process may hold threads, connections and locks.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(build, arguments),
    )
    waiting: deque[Future[Any]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_call, task))
            while len(waiting) > 2 * workers + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise WorkerDied(
            "a worker process died without a word: killed for want of memory, or crashed in a "
            "decoder; fewer workers take less memory, and 0 workers show where it crashes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(build: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _function
    # Ctrl-C reaches the whole group; the parent ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()
    _function = build(*arguments)


def _follow_parent() -> None:
    """End with the parent: workers of a killed one would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(task: Any) -> Any:
    assert _function is not None
    return _function(task)
