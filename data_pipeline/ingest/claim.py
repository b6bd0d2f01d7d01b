"""Lock that admits one writer per source, across machines.

`NAME/.ingest/lock` names the writer. It is created exclusively, renewed every BEAT_S, and removed
when the writer exits normally or with an error. A killed writer leaves the lock. On the same
machine, the next writer sees that the process is gone; on another machine, it takes the name over
if the lock does not change for SILENT_S. No clocks are compared. A writer that has lost its claim
(suspended, or cut off from the store) notices before it writes its next object. A writer that was
suspended while it renewed the lock may have overwritten its successor's lock: it gives up, and so
does the successor, because the lock is no longer its own.
"""

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.open import (
    FolderStore,
    MemoryStore,
    MissingBucket,
    MissingKey,
    ObjectChanged,
    Store,
    StoreError,
)

BEAT_S = 15.0
SILENT_S = 60.0
# If two writers may both have written the lock (a takeover, or an object store that ignores
# If-None-Match), each waits this long and then checks whose write was last.
_SETTLE_S = 1.0

# Ids of the claims that this process holds. A lock of this process with another id is left over
# from a claim whose removal failed.
_HELD: set[str] = set()


class NameTaken(ValueError):
    """Another process is writing the source or has taken it over; the message names it."""


class Claim:
    """Holds the name of an unfinished source; a context whose entry may raise NameTaken.

    Args:
        store, name: the root, and the source to be written.
        wait: True to wait on entry, one second on an object store, until the claim is certain. With
            False, the caller can do other work meanwhile and must call `settle` before it writes or
            removes an object.
    """

    def __init__(self, store: Store, name: str, *, wait: bool = True) -> None:
        self._store, self._source, self._key = store, f"{store.uri}/{name}", f"{name}/.ingest/lock"
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._mine = {"id": secrets.token_hex(8), **_this_process(), "since": since}
        self._wait, self._settling = wait, threading.Lock()
        self._settled_at: float | None = None  # None: the claim is certain
        self._renewing: float | None = None  # start of a renewal in progress
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ingest claim", daemon=True)

    def __enter__(self) -> Self:
        _HELD.add(self._mine["id"])
        try:
            self._take()
            if self._wait:
                self.settle()
        except BaseException:
            _HELD.discard(self._mine["id"])
            raise
        self._thread.start()
        return self

    def _take(self) -> None:
        settle = not isinstance(self._store, FolderStore | MemoryStore)
        while not self._store.put_new(self._key, self._text(0)):
            found = self._read()
            if found is None:
                continue  # just removed
            holder, version = found
            if holder.get("id") == self._mine["id"]:
                break  # our request succeeded, but its response was lost
            if not _is_dead(holder) and self._lives(holder, version):
                raise NameTaken(_told(self._source, holder))
            if self._version() == version:
                self._store.put(self._key, self._text(0))
                settle = True
                break
        if settle:
            self._settled_at = time.monotonic() + _SETTLE_S

    def settle(self) -> None:
        """Wait until the claim is certain; later calls return at once.

        Raises:
            NameTaken: another process holds the name.
        """
        with self._settling:
            if self._settled_at is not None:
                time.sleep(max(0.0, self._settled_at - time.monotonic()))
                self.check()
                self._settled_at = None

    def __exit__(self, *_: object) -> None:
        _HELD.discard(self._mine["id"])
        self._end.set()
        self._thread.join()
        # An error here must not hide the original one; the next writer takes over a stale lock.
        with suppress(StoreError, OSError):
            found = self._read()
            if found and found[0].get("id") == self._mine["id"]:
                self._store.delete(self._key)

    def check(self) -> None:
        """Check that this process still holds the name; called before every write to the source.

        Raises:
            NameTaken: it does not.
        """
        found = self._read()
        if found is None:
            raise NameTaken(
                f"{self._source}: {self._key} was removed while this ingest was writing; run it "
                "again"
            )
        if found[0].get("id") != self._mine["id"]:
            raise NameTaken(_told(self._source, found[0]))
        since = self._renewing
        if since is not None and time.monotonic() - since > SILENT_S:
            raise NameTaken(
                f"{self._source}: this process stood still for more than {SILENT_S:g} s while it "
                f"renewed {self._key}, and another may have written the source; run it again"
            )

    def _text(self, beat: int) -> bytes:
        return (json.dumps({**self._mine, "beat": beat}) + "\n").encode()

    def _beat(self) -> None:
        number = 0
        while not self._end.wait(BEAT_S):
            number += 1
            try:
                self._renew(number)
            except NameTaken:
                return  # the writer notices before its next object
            except (StoreError, OSError):
                continue  # the store is unreachable, which the writer notices too

    def _renew(self, number: int) -> None:
        """Check the holder and renew the lock; after a slow renewal, `check` always fails."""
        begun = time.monotonic()
        self.check()
        if time.monotonic() - begun > SILENT_S:
            return  # the store was unreachable; the next beat renews the lock
        self._renewing = begun
        try:
            self._store.put(self._key, self._text(number))
        finally:
            if time.monotonic() - begun <= SILENT_S:
                self._renewing = None

    def _read(self) -> tuple[dict[str, Any], str] | None:
        """Return the holder of the name and the version of the lock; None without a lock."""
        while True:
            try:
                etag = self._store.head(self._key).etag
                data = self._store.get(self._key, etag=etag)
            except (MissingKey, MissingBucket):
                return None
            except ObjectChanged:
                continue  # the lock was written between the two requests
            try:
                found = parse_json(data, self._key)
            except ValueError:
                found = {}
            return found if isinstance(found, dict) else {}, etag

    def _version(self) -> str | None:
        try:
            return self._store.head(self._key).etag
        except (MissingKey, MissingBucket):
            return None

    def _lives(self, holder: dict[str, Any], version: str) -> bool:
        """Return whether a holder renews the lock within SILENT_S.

        A holder on this machine counts as alive, because `_is_dead` has checked its process.
        """
        if self._mine["machine"] is not None and holder.get("machine") == self._mine["machine"]:
            return True
        end = time.monotonic() + SILENT_S
        while time.monotonic() < end:
            time.sleep(min(1.0, SILENT_S / 10))
            if self._version() != version:
                return True
        return False


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "started": _started(pid),
        "machine": _machine(),
    }


def _machine() -> str | None:
    """Return an id of this boot and PID namespace; None if /proc does not give it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """Return the start time of a process in kernel ticks; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_dead(holder: dict[str, Any]) -> bool:
    """Return whether a holder is a process of this machine that has ended."""
    machine, pid = _machine(), holder.get("pid")
    if machine is None or holder.get("machine") != machine or not isinstance(pid, int):
        return False
    if pid == os.getpid() and holder.get("id") not in _HELD:
        return True
    return _started(pid) != holder.get("started")


def _told(source: str, holder: dict[str, Any]) -> str:
    return (
        f"{source} is being written by another process: {holder.get('pid', 'unknown')} on "
        f"{holder.get('host', 'an unknown host')}, since {holder.get('since', 'just now')}; wait "
        "for its end, or choose another name"
    )
