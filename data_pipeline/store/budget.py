"""Request budget shared by the processes of a node: limits their total requests per second.

The budget is a token bucket in a small shared file. A process draws a ticket for each request.
Tickets are served in order, `rate` of them per second, so no request overtakes another, and a
change of the rate reaches all waiting processes. If a process dies in the queue, its ticket is
lost, which costs one request and needs no cleanup.

The rate follows the server (AIMD, as in TCP). A 503 or 429 response to any process halves it, at
most once a second. Then it grows by a constant step per second until it reaches its ceiling again.

There are two locks; the kernel releases both when a process ends for any reason:

- `requests.budget` is locked for the microseconds of one change.
- `requests.users` is locked (shared) by every process that has the budget open. A process that gets
  the exclusive lock is the only user and resets the state. So a stale file, left by another
  configuration or before a reboot, is never used.
"""

import fcntl
import hashlib
import math
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType

from data_pipeline.store.objects import StoreError, StoreUnavailable
from data_pipeline.store.private import private_folder

_CUT = 0.5  # factor on the rate when the server throttles
_CUT_EVERY_S = 1.0
_RECOVERY_S = 60.0  # time from the floor to the ceiling
_FLOOR = 1 / 64  # fraction of the ceiling
_LOOK_S = 0.25  # waiting processes notice a change of the rate within this time
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Bucket:
    """State of the budget, with pure arithmetic on it.

    ceiling: configured requests per second.
    burst: requests that an idle budget saves up.
    rate: current requests per second.
    drawn: tickets drawn so far.
    served: tickets released so far, at most `burst` above `drawn`.
    at: time of this state, in seconds of the monotonic clock.
    cut_at: time of the last rate cut.
    """

    ceiling: float
    burst: float
    rate: float
    drawn: float
    served: float
    at: float
    cut_at: float

    @staticmethod
    def fresh(ceiling: float, burst: float, now: float) -> "Bucket":
        """Return a full bucket at its full rate."""
        return Bucket(ceiling, burst, ceiling, 0.0, burst, now, -math.inf)

    def later(self, now: float) -> "Bucket":
        """Return the state at `now`, with more tickets served and a partly recovered rate."""
        passed = max(0.0, now - self.at)
        return replace(
            self,
            served=min(self.served + passed * self.rate, self.drawn + self.burst),
            rate=min(self.ceiling, self.rate + passed * self.ceiling * (1 - _FLOOR) / _RECOVERY_S),
            at=now,
        )

    def cut(self) -> "Bucket":
        """Return the state with a lower rate and no saved requests; at most one cut per second."""
        if self.at - self.cut_at < _CUT_EVERY_S:
            return self
        return replace(
            self,
            rate=max(self.ceiling * _FLOOR, self.rate * _CUT),
            served=min(self.served, self.drawn),
            cut_at=self.at,
        )

    def wait(self, ticket: float) -> float:
        """Return the seconds until `ticket` is served at this rate."""
        return max(0.0, (ticket - self.served) / self.rate)


_LAYOUT = struct.Struct("<8s16s7d")
_MAGIC = b"budget1\0"


class Budget:
    """Request budget of a node; every process opens its own object on the same folder.

    Unpickling opens it again in the other process. Do not use it after `close`.

    Args:
        folder: folder of the two files, created if missing. It must be local to the node, not
            subject to automatic cleanup, and writable only by this user
            (`data_pipeline.store.private`).
        rate: requests per second, over all processes.
        burst: requests allowed at once after a pause; None allows the requests of one second.

    Raises:
        ValueError: the rate is not above 0 or the burst is below 1, other processes have the budget
            open with other numbers, or processes of another machine have it open.
        StoreError: the folder is not writable, or other users can write to it.
    """

    def __init__(
        self, folder: str | os.PathLike[str], rate: float, burst: float | None = None
    ) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.ceiling = float(rate)
        self.burst = max(1.0, self.ceiling) if burst is None else float(burst)
        if not (0 < self.ceiling < math.inf and 1 <= self.burst < math.inf):
            raise ValueError(
                f"request budget: rate {rate!r} per second and burst {burst!r}; the rate must be "
                "above 0, the burst 1 or more"
            )
        self._draw = random.Random()
        self._files: tuple[int, int] | None = None
        self._open()

    def __repr__(self) -> str:
        return f"Budget({str(self.folder)!r}, rate={self.ceiling:g}, burst={self.burst:g})"

    def __reduce__(self) -> tuple[object, ...]:
        return (Budget, (self.folder, self.ceiling, self.burst))

    def __enter__(self) -> "Budget":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def take(
        self, what: str, timeout: float = _PATIENCE_S, closing: threading.Event | None = None
    ) -> float:
        """Wait until one request may be sent.

        Args:
            what: the object to read or write, for error messages.
            timeout: seconds after which to stop waiting.
            closing: event that ends the wait.

        Returns:
            Seconds waited.

        Raises:
            StoreUnavailable: the wait exceeded `timeout`, or `closing` was set.
            StoreError: the budget's file cannot be used.
        """
        begin = time.monotonic()
        deadline = begin + timeout
        ticket, bucket = self._ticket(math.inf, what, deadline)
        waker = closing or threading.Event()
        while delay := bucket.wait(ticket):
            left = deadline - time.monotonic()
            if left <= 0 or waker.wait(min(delay, left, _LOOK_S)):
                reason = "its store was closed" if waker.is_set() else f"{timeout:g} s passed"
                raise StoreUnavailable(
                    f"{what}: {reason} while it waited for the node's request budget in "
                    f"{self.folder} ({bucket.rate:.3g} of {self.ceiling:g} requests/s, about "
                    f"{ticket - bucket.served:.0f} before it); raise the budget, or ask less at "
                    "a time"
                )
            ticket, bucket = self._ticket(ticket, what, deadline)
        return time.monotonic() - begin

    def throttled(self) -> None:
        """Record that the server throttled a request."""
        with self._change("a throttled request", time.monotonic() + _PATIENCE_S) as held:
            held.bucket = held.bucket.cut()

    def spare(self) -> bool:
        """Return whether an optional request may be sent now: the rate must be at its ceiling."""
        bucket = self.bucket
        return bucket.rate >= bucket.ceiling and bucket.served - bucket.drawn >= 1

    @property
    def bucket(self) -> Bucket:
        """Current state."""
        with self._change("the state", time.monotonic() + _PATIENCE_S) as held:
            return held.bucket

    def close(self) -> None:
        """Close the files. They stay on disk; the next first user resets them."""
        files, self._files = self._files, None
        for file in files or ():
            os.close(file)

    def _open(self) -> None:
        self.close()
        self._pid, self._lock = os.getpid(), threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._explained():
            self.folder = private_folder(self.folder)
            state = os.open(self.folder / "requests.budget", flags, 0o600)
            try:
                users = os.open(self.folder / "requests.users", flags, 0o600)
            except BaseException:
                os.close(state)
                raise
        self._files = (state, users)
        try:
            with self._locked("opening the request budget", time.monotonic() + _PATIENCE_S):
                try:
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._check_others()
                else:
                    self._write(Bucket.fresh(self.ceiling, self.burst, time.monotonic()))
                fcntl.flock(users, fcntl.LOCK_SH)
        except BaseException:
            self.close()
            raise

    def _check_others(self) -> None:
        """Refuse to join if the other users have other settings or run on another machine."""
        raw = self._read_raw()
        if raw is None:
            return  # damaged; the next change resets it
        machine, bucket = raw
        if machine != _machine():
            raise ValueError(
                f"the request budget in {self.folder} is in use on another machine, whose clock "
                "says nothing here; give a folder that is local to the node"
            )
        if (bucket.ceiling, bucket.burst) != (self.ceiling, self.burst):
            raise ValueError(
                f"the request budget in {self.folder} is open in other processes with "
                f"{bucket.ceiling:g} requests/s and a burst of {bucket.burst:g}, here with "
                f"{self.ceiling:g} and {self.burst:g}; give all of them the same"
            )

    def _ticket(self, ticket: float, what: str, deadline: float) -> tuple[float, Bucket]:
        """Return a ticket and the state; draw a new ticket if `ticket` is not in the state."""
        with self._change(what, deadline) as held:
            if ticket > held.bucket.drawn:  # on the first call, or after damage to the file
                ticket = held.bucket.drawn + 1
                held.bucket = replace(held.bucket, drawn=ticket)
            return ticket, held.bucket

    @contextmanager
    def _change(self, what: str, deadline: float) -> Iterator["_Held"]:
        """Yield the current state under the lock; `bucket` is written back at the end."""
        if self._pid != os.getpid():
            self._open()  # after a fork, parent and child share the lock, which excludes neither
        with self._locked(what, deadline):
            now, raw = time.monotonic(), self._read_raw()
            # If the file was overwritten, continue with an empty bucket.
            bucket = replace(Bucket.fresh(self.ceiling, self.burst, now), served=0.0)
            if raw is not None:
                bucket = raw[1].later(now)
            held = _Held(bucket)
            yield held
            self._write(held.bucket)

    @contextmanager
    def _locked(self, what: str, deadline: float) -> Iterator[None]:
        files = self._files
        if files is None:
            raise ValueError(f"{what}: the request budget in {self.folder} is closed")
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._stuck(what)
        try:
            with self._explained():
                while not _try_lock(files[0]):
                    if time.monotonic() > deadline:
                        raise self._stuck(what)
                    time.sleep(self._draw.uniform(0.0002, 0.002))
                try:
                    yield
                finally:
                    fcntl.flock(files[0], fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def _stuck(self, what: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"{what}: waited in vain for the lock of {self.folder / 'requests.budget'}; a process "
            "that has this request budget open hangs or is stopped, end it"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"the request budget in {self.folder} cannot be used: {error}; give a folder of "
                "a local file system that can be written"
            ) from error

    def _read_raw(self) -> tuple[bytes, Bucket] | None:
        """Return the machine that wrote the file, and the state; None if the file is invalid."""
        assert self._files is not None
        data = os.pread(self._files[0], _LAYOUT.size, 0)
        if len(data) != _LAYOUT.size:
            return None
        magic, machine, *numbers = _LAYOUT.unpack(data)
        bucket = Bucket(*numbers)
        sound = bucket.rate > 0 and not any(math.isnan(number) for number in numbers)
        return (machine, bucket) if magic == _MAGIC and sound else None

    def _write(self, bucket: Bucket) -> None:
        assert self._files is not None
        os.pwrite(self._files[0], _LAYOUT.pack(_MAGIC, _machine(), *astuple(bucket)), 0)


class _Held:
    """Mutable state inside `_change`."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _machine() -> bytes:
    """Return 16 bytes that identify this machine and its boot, because clocks restart at boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # not Linux: use the host name
        boot = os.uname().nodename.encode()
    return hashlib.blake2b(boot, digest_size=16).digest()
