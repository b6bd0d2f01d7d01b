"""Locks on files that the kernel gives back when a process ends, however it ends."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def patiently(attempt: Callable[[], bool], wait_s: float, failure: Callable[[], Exception]) -> bool:
    """Call `attempt` until it returns True; whether that took more than one call.

    Asking again and again, because no lock of the kernel can be waited for with a time limit.

    Raises:
        Exception: `failure()`, after `wait_s` seconds.
    """
    if attempt():
        return False
    deadline, pause = time.monotonic() + wait_s, 0.0005
    while True:
        time.sleep(pause)
        if attempt():
            return True
        if time.monotonic() >= deadline:
            raise failure()
        pause = min(1.5 * pause, 0.02)


@contextmanager
def locked_file(path: Path, wait_s: float, failure: Callable[[], Exception]) -> Iterator[int]:
    """Hold `flock` on the file (made if missing); yields its descriptor.

    Opened anew each time, so that threads of one process exclude each other too.

    Raises:
        Exception: `failure()`, if somebody else held it for `wait_s` seconds.
    """
    handle = os.open(path, LOCK_FILE, 0o600)
    try:
        patiently(lambda: try_flock(handle, fcntl.LOCK_EX), wait_s, failure)
        yield handle
    finally:
        unlock_and_close(handle)


def try_flock(handle: int, kind: int) -> bool:
    """Take a `flock` of this kind if nobody else has it."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock_and_close(handle: int) -> None:
    """Closing alone is not enough: a process forked meanwhile has the descriptor too."""
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
