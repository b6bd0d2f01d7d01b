"""Taking turns on a page: whoever would wait too long is told to come again."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class ComeAgain(Exception):
    """What was asked for takes longer than a request may; work that was done is kept."""


@contextmanager
def turn(
    lock: "threading.Lock | threading.BoundedSemaphore", until: float, told: str
) -> Iterator[None]:
    """Hold a lock, for which is waited until a time.

    Args:
        until: by time.monotonic(); math.inf: for ever.
        told: what is under way.

    Raises:
        ComeAgain: it was not free by then; says what was told.
    """
    wait = -1 if until == math.inf else max(0.0, until - time.monotonic())
    if not lock.acquire(timeout=wait):
        raise ComeAgain(told)
    try:
        yield
    finally:
        lock.release()
