"""Maps a function over tasks in worker processes and yields the results in task order.

It uses processes, not threads, because much of the work per sample is Python code, which the GIL
would confine to one core. Only a few tasks are in flight, so a slow consumer throttles the workers,
and memory stays bounded.
"""

import threading
from collections.abc import Callable, Generator, Iterable
from queue import SimpleQueue
from typing import TypeVar

from data_pipeline.workers.workers import Workers

Task = TypeVar("Task")
Result = TypeVar("Result")


def ordered_map(
    setup: Callable[[], Callable[[Task], Result]], tasks: Iterable[Task], workers: int
) -> Generator[Result, None, None]:
    """Yield the results of tasks in their order.

    Args:
        setup: called once in each process; returns the function. It must be picklable. State that
            is expensive to build or send belongs in it, so that tasks need not carry it.
        tasks: read in the consumer's thread, because an SQLite cursor works in only one thread,
            and only a few tasks more than there are workers ahead of the results.
        workers: processes; 0 does the work in this process.

    Raises:
        WorkerDied: two workers in a row were killed or crashed with the same task.
    """
    if not workers:
        yield from map(setup(), tasks)
        return
    with Workers(setup, workers, timeout_s=threading.TIMEOUT_MAX) as pool:
        fed = SimpleQueue[tuple[Task, int] | None]()  # None: the end
        most = 2 * workers + 2
        results = pool.run(iter(fed.get, None), max_bytes=0, max_jobs=most)
        try:
            for number, task in enumerate(tasks, 1):
                fed.put((task, 0))
                if number >= most:
                    yield next(results)
            fed.put(None)
            yield from results
        finally:
            fed.put(None)  # otherwise a worker's thread would wait for a task forever
