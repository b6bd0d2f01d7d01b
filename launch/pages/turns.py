"""Locks with a deadline for page requests; a request that would wait too long must retry."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class ComeAgain(Exception):
    """The work takes longer than a request may; the finished part of the work is kept."""


@contextmanager
def turn(
    lock: "threading.Lock | threading.BoundedSemaphore", until: float, told: str
) -> Iterator[None]:
    """Hold a lock; wait for it until a deadline.

    Args:
        until: deadline in time.monotonic() seconds; math.inf waits forever.
        told: message about the work in progress.

    Raises:
        ComeAgain: the lock was not free at the deadline; its message is `told`.
    """
    wait = -1 if until == math.inf else max(0.0, until - time.monotonic())
    if not lock.acquire(timeout=wait):
        raise ComeAgain(told)
    try:
        yield
    finally:
        lock.release()
