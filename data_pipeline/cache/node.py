"""Shared folder and locks for the cache processes of a node; the last process removes the folder.

Both use locks that the kernel releases when a process ends for any reason:

- A **lease** (shared `flock` on the folder itself) marks a folder as used. Every process that
  starts or ends removes the folders without a lease. So leftovers of a killed process in shared
  memory disappear at the next start at the latest.
- A **range lock** (open-file-description lock on bytes of one file) marks blocks as being fetched.
  A run of blocks is one range, so a thread never holds one lock while it waits for another, and
  overlapping runs cannot deadlock.
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
# A lock holder writes its process id here, at an offset given by the first byte of its range,
# because the kernel does not report the owner of an open-file-description lock.
_NOTES, _NOTE = 4096, struct.Struct("<i")


class CacheTimeout(StoreUnavailable):
    """Another process held a cache lock for too long; the message names the process and purpose."""


def patiently(attempt: Callable[[], bool], wait_s: float, complaint: Callable[[], str]) -> bool:
    """Call `attempt` until it returns True; return whether that took more than one call.

    It polls, because these kernel locks offer no wait with a timeout.

    Raises:
        CacheTimeout: `wait_s` seconds have passed; the message is `complaint()`.
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
    """Hold `flock` on the file (created if missing) and yield its descriptor.

    Each call opens the file again, so that threads of one process also exclude each other.
    """
    handle = os.open(path, _LOCK_FILE, 0o600)
    try:
        _flock_patiently(handle, path, wait_s)
        yield handle
    finally:
        _unlock_and_close(handle)


def try_flock(handle: int, kind: int) -> bool:
    """Take a `flock` of this kind if it is free; return whether it was."""
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
    # Closing does not release the lock if a process forked meanwhile also has the descriptor.
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


class NodeFolder:
    """Folder `<parent>/kimi-pretrain-cache-<uid>/<name>` that exists while any process uses it.

    Args:
        parent: existing folder of this node, normally `SHARED_MEMORY`.
        name: processes with the same name share the folder.
        wait_s: seconds to wait for processes that start or end at the same time.

    Attributes:
        path: the folder.
        first: True if no other process used the folder when this one opened it.

    Raises:
        OSError: the folder cannot be created here, or belongs to another user.
        CacheTimeout: another process held the folder's lock for longer than `wait_s`.
    """

    def __init__(self, parent: Path, name: str, wait_s: float) -> None:
        base = parent / f"kimi-pretrain-cache-{os.getuid()}"
        self.path = base / name
        with _guarded(base, wait_s):
            _remove_unused(base)
            self.first = not self.path.exists()
            self.path.mkdir(mode=0o700, exist_ok=True)
            lease = os.open(self.path, _DIRECTORY)
            # This cannot block, because only the holder of the base lock takes exclusive locks.
            fcntl.flock(lease, fcntl.LOCK_SH)
        # Also runs when the process exits normally without close().
        self._leave = weakref.finalize(self, _leave, base, lease, wait_s)

    def close(self) -> None:
        """Release the lease; the last user removes the folder. A second call does nothing."""
        self._leave()


@contextmanager
def _guarded(base: Path, wait_s: float) -> Iterator[None]:
    """Hold an exclusive lock on the folder `base` itself, created if missing."""
    while True:
        base.mkdir(mode=0o700, exist_ok=True)
        try:
            handle = os.open(base, _DIRECTORY)
        except FileNotFoundError:
            continue  # the last user has just removed it
        try:
            # All users can write to /dev/shm.
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
    """Remove folders without a lease. The caller must hold the lock on `base`."""
    for child in sorted(base.iterdir()):
        try:
            handle = os.open(child, _DIRECTORY)
        except OSError:
            continue  # not one of our folders
        try:
            if try_flock(handle, fcntl.LOCK_EX):
                shutil.rmtree(child, ignore_errors=True)
        finally:
            os.close(handle)


def _leave(base: Path, lease: int, wait_s: float) -> None:
    # A forked child does not release the lease, which holds until the parent closes it too.
    with _guarded(base, wait_s):
        os.close(lease)
        _remove_unused(base)
        with suppress(OSError):  # other folders are still in use
            base.rmdir()


class RangeLocks:
    """Exclusive locks on number ranges, across all threads and processes that use the same file."""

    def __init__(self, path: Path, wait_s: float) -> None:
        self._path, self._wait_s = path, wait_s

    @contextmanager
    def hold(self, first: int, count: int, what: str) -> Iterator[bool]:
        """Lock the numbers [first, first + count); yield whether it had to wait.

        Args:
            first: first number, below 2^62.
            count: at least 1.
            what: the locked object, for the error.

        Raises:
            CacheTimeout: another holder kept one of the numbers for longer than `wait_s`.
            OSError: the file cannot be opened.
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
            except (BlockingIOError, PermissionError):  # either may mean that the lock is held
                return False
            return True

        def complaint() -> str:
            return (
                f"waited {self._wait_s:g} s for {_holder(handle, request)} on this node to fetch "
                f"{what}; if it hangs, end it: its lock goes with it (or give it longer: wait_s)"
            )

        waited = patiently(attempt, self._wait_s, complaint)
        with suppress(OSError):  # if shared memory is full, the lock still holds, without a name
            os.pwrite(handle, _NOTE.pack(os.getpid()), first % _NOTES * _NOTE.size)
        return waited


def _holder(handle: int, request: bytes) -> str:
    kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(handle, fcntl.F_OFD_GETLK, request))
    note = os.pread(handle, _NOTE.size, start % _NOTES * _NOTE.size)
    if kind == fcntl.F_UNLCK or len(note) < _NOTE.size:
        return "another process"
    return f"process {_NOTE.unpack(note)[0]}"
