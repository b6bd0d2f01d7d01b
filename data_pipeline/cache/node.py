"""What the processes of one node share to use a cache together: a folder that goes away with the
last of them, and locks that a dead process cannot keep.

Both rest on locks that the kernel gives back when a process ends, however it ends:

- a **lease** (`flock` on the folder itself, shared) says that somebody uses the folder. Whoever
  comes or goes removes the folders on which nobody has one, so what a killed process left in
  shared memory is gone at the next start at the latest.
- a **range lock** (an open-file-description lock on bytes of one file) says that somebody fetches
  these blocks. A run of blocks is one range, so a thread never holds one lock while it waits for
  another, and overlapping runs cannot deadlock.
"""

import fcntl
import os
import shutil
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_pipeline.store.objects import StoreUnavailable
from data_pipeline.store.private import check_status

SHARED_MEMORY = Path("/dev/shm")

_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi0q")
# A locker notes its process id here, under the first byte of its range: the kernel does not tell
# whose an open-file-description lock is.
_NOTES, _NOTE = 4096, struct.Struct("<i")


class CacheTimeout(StoreUnavailable):
    """Another process held a lock of the cache for too long; the message says who and for what."""


def patiently(attempt: Callable[[], bool], wait_s: float, complaint: Callable[[], str]) -> bool:
    """Call `attempt` until it returns True; whether that took more than one call.

    Asking again and again, because no lock of the kernel can be waited for with a time limit.

    Raises:
        CacheTimeout: with `complaint()`, after `wait_s` seconds.
    """
    if attempt():
        return False
    deadline, pause = time.monotonic() + wait_s, 0.0005
    while True:
        time.sleep(pause)
        if attempt():
            return True
        if time.monotonic() >= deadline:
            raise CacheTimeout(complaint())
        pause = min(1.5 * pause, 0.02)


@contextmanager
def locked_file(path: Path, wait_s: float) -> Iterator[int]:
    """Hold `flock` on the file (made if missing); yields its descriptor.

    Opened anew each time, so that threads of one process exclude each other too.
    """
    handle = os.open(path, _LOCK_FILE, 0o600)
    try:
        _flock_patiently(handle, path, wait_s)
        yield handle
    finally:
        _unlock_and_close(handle)


def try_flock(handle: int, kind: int) -> bool:
    """Take a `flock` of this kind if nobody else has it."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _flock_patiently(handle: int, path: Path, wait_s: float) -> None:
    patiently(
        lambda: try_flock(handle, fcntl.LOCK_EX),
        wait_s,
        lambda: (
            f"{path}: another process has held its lock for {wait_s:g} s; find it with "
            "`fuser` or `lslocks` and end it if it hangs"
        ),
    )


def _unlock_and_close(handle: int) -> None:
    # Closing alone is not enough: a process forked meanwhile has the descriptor too.
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


class NodeFolder:
    """A folder `<parent>/kimi-pretrain-cache-<uid>/<name>` that lives as long as a process uses it.

    Args:
        parent: an existing folder of this node, normally `SHARED_MEMORY`.
        name: processes that give the same name share the folder.
        wait_s: patience with others that come or go at the same time.

    Attributes:
        path: the folder.
        first: nobody else used it when this one came.

    Raises:
        OSError: the folder cannot be made here, or it belongs to somebody else.
        CacheTimeout: somebody held the folder's lock for longer than `wait_s`.
    """

    def __init__(self, parent: Path, name: str, wait_s: float) -> None:
        base = parent / f"kimi-pretrain-cache-{os.getuid()}"
        self.path = base / name
        with _guarded(base, wait_s):
            _remove_unused(base)
            self.first = not self.path.exists()
            self.path.mkdir(mode=0o700, exist_ok=True)
            lease = os.open(self.path, _DIRECTORY)
            # Cannot block: the exclusive lock is only ever taken by who guards the base.
            fcntl.flock(lease, fcntl.LOCK_SH)
        # Also runs when the process ends in an orderly way without close().
        self._leave = weakref.finalize(self, _leave, base, lease, wait_s)

    def close(self) -> None:
        """Give up the lease; the last one out removes the folder. A second call does nothing."""
        self._leave()


@contextmanager
def _guarded(base: Path, wait_s: float) -> Iterator[None]:
    """Hold the exclusive lock on the folder `base` itself; made if missing."""
    while True:
        base.mkdir(mode=0o700, exist_ok=True)
        try:
            handle = os.open(base, _DIRECTORY)
        except FileNotFoundError:
            continue  # the last user left in between and took it along
        try:
            # Anybody may write to /dev/shm.
            check_status(base, os.fstat(handle))
            _flock_patiently(handle, base, wait_s)
            if _same(base, handle):
                yield
                return
        finally:
            _unlock_and_close(handle)


def _same(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _remove_unused(base: Path) -> None:
    """Remove the folders on which nobody holds a lease. Call it under the guard of `base`."""
    for child in sorted(base.iterdir()):
        try:
            handle = os.open(child, _DIRECTORY)
        except OSError:
            continue  # not a folder of ours
        try:
            if try_flock(handle, fcntl.LOCK_EX):
                shutil.rmtree(child, ignore_errors=True)
        finally:
            os.close(handle)


def _leave(base: Path, lease: int, wait_s: float) -> None:
    # In a forked child this gives up nothing: the lease holds until the parent has closed it too.
    with _guarded(base, wait_s):
        os.close(lease)
        _remove_unused(base)
        with suppress(OSError):  # others are still here
            base.rmdir()


class RangeLocks:
    """Exclusive locks on ranges of numbers, over all threads and processes that name one file."""

    def __init__(self, path: Path, wait_s: float) -> None:
        self._path, self._wait_s = path, wait_s

    @contextmanager
    def hold(self, first: int, count: int, what: str) -> Iterator[bool]:
        """Hold the numbers [first, first + count); yields whether it had to wait.

        Args:
            first: below 2^62.
            count: at least 1.
            what: what is waited for, for the error.

        Raises:
            CacheTimeout: somebody held one of them for longer than the patience.
            OSError: the file is gone.
        """
        handle = os.open(self._path, _LOCK_FILE, 0o600)
        try:
            yield self._take(handle, first, count, what)
        finally:
            fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, 0, 0, 0))
            os.close(handle)

    def _take(self, handle: int, first: int, count: int, what: str) -> bool:
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)

        def attempt() -> bool:
            try:
                fcntl.fcntl(handle, fcntl.F_OFD_SETLK, request)
            except (BlockingIOError, PermissionError):  # systems differ in which one says "held"
                return False
            return True

        def complaint() -> str:
            return (
                f"waited {self._wait_s:g} s for {_holder(handle, request)} on this node to fetch "
                f"{what}; if it hangs, end it: its lock goes with it (or give it longer: wait_s)"
            )

        waited = patiently(attempt, self._wait_s, complaint)
        with suppress(OSError):  # shared memory is full: the lock holds, without a name
            os.pwrite(handle, _NOTE.pack(os.getpid()), first % _NOTES * _NOTE.size)
        return waited


def _holder(handle: int, request: bytes) -> str:
    kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(handle, fcntl.F_OFD_GETLK, request))
    note = os.pread(handle, _NOTE.size, start % _NOTES * _NOTE.size)
    if kind == fcntl.F_UNLCK or len(note) < _NOTE.size:
        return "another process"
    return f"process {_NOTE.unpack(note)[0]}"
