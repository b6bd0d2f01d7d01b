"""A function over many tasks in other processes, results in the order of the tasks.

Processes and not threads: much of what is done to a sample is Python, which threads would share one
core for. No more than a few tasks are under way, so a slow reader of the results holds the work up,
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
        setup: called once in each process, gives the function; it must be picklable. What is
            expensive to build or to send is sent once, not with every task.
        tasks: read in the thread of whoever reads the results (a cursor of SQLite allows no other),
            only a few more than there are workers ahead of them.
        workers: processes; 0 does the work here.

    Raises:
        WorkerDied: two workers in a row were killed, or crashed, with the same task.
    """
    if not workers:
        yield from map(setup(), tasks)
        return
    with Workers(setup, workers, timeout_s=threading.TIMEOUT_MAX) as pool:
        fed = SimpleQueue[tuple[Task, int] | None]()  # None: there are no more
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
            fed.put(None)  # or a worker's thread would wait for a task for ever
