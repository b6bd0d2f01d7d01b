"""One writer of a source at a time, on whatever machines they are.

`NAME/.ingest/lock` says who is writing the source. It is created exclusively, written again every
BEAT_S, and goes when the writer ends in any order. One that was killed leaves it behind: on the
same machine a later writer sees that the process is gone; from another machine it watches for
SILENT_S whether the lock still changes, and then takes the name over. No clocks are compared. A
writer that lost its claim meanwhile (stopped, or cut off from the store) sees it before its next
object. One that was stopped while it renewed the lock may have written over its successor's: it
gives up, and so does the successor, to whom the lock is another's.
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
# Where two writers might both believe that they have the name (a takeover, or an object store that
# ignores If-None-Match), they see after so long who wrote last.
_SETTLE_S = 1.0

# Ids of the claims that this process holds: of its other ones it could only not remove the lock.
_HELD: set[str] = set()


class NameTaken(ValueError):
    """Another process is writing the source, or has taken it over; the message says which."""


class Claim:
    """Holds the name of an unfinished source; a context, whose entry may raise NameTaken.

    Args:
        store, name: the root, and the source that is going to be written.
        wait: whether the entry waits, a second on an object store, until the name is surely held.
            Who does other work meanwhile calls `settle` before it writes or removes an object.
    """

    def __init__(self, store: Store, name: str, *, wait: bool = True) -> None:
        self._store, self._source, self._key = store, f"{store.uri}/{name}", f"{name}/.ingest/lock"
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._mine = {"id": secrets.token_hex(8), **_this_process(), "since": since}
        self._wait, self._settling = wait, threading.Lock()
        self._settled_at: float | None = None  # None: it is
        self._renewing: float | None = None  # since when
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
                continue  # just gone
            holder, version = found
            if holder.get("id") == self._mine["id"]:
                break  # written by a request whose answer was lost
            if not _is_dead(holder) and self._lives(holder, version):
                raise NameTaken(_told(self._source, holder))
            if self._version() == version:
                self._store.put(self._key, self._text(0))
                settle = True
                break
        if settle:
            self._settled_at = time.monotonic() + _SETTLE_S

    def settle(self) -> None:
        """Wait until the name is surely this process's: only once, and then at no cost.

        Raises:
            NameTaken: it is another's.
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
        # An error on the way out must not hide the one that led here; a dead lock is taken over.
        with suppress(StoreError, OSError):
            found = self._read()
            if found and found[0].get("id") == self._mine["id"]:
                self._store.delete(self._key)

    def check(self) -> None:
        """Make sure that the name is still this process's; called before every object of a source.

        Raises:
            NameTaken: it is not.
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
                return  # the writer finds out before its next object
            except (StoreError, OSError):
                continue  # the store is away; the writer meets it, too

    def _renew(self, number: int) -> None:
        """Look whose the lock is, and write it again; `check` refuses for good if it took long."""
        begun = time.monotonic()
        self.check()
        if time.monotonic() - begun > SILENT_S:
            return  # the store was away; with the next beat
        self._renewing = begun
        try:
            self._store.put(self._key, self._text(number))
        finally:
            if time.monotonic() - begun <= SILENT_S:
                self._renewing = None

    def _read(self) -> tuple[dict[str, Any], str] | None:
        """Who holds the name, and the version of the lock; None if nobody does."""
        while True:
            try:
                etag = self._store.head(self._key).etag
                data = self._store.get(self._key, etag=etag)
            except (MissingKey, MissingBucket):
                return None
            except ObjectChanged:
                continue  # it was written in between
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
        """Whether a holder shows life within SILENT_S; one of this machine does, if not dead."""
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
    """What tells this system, since it was booted, and its process numbers from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None if it is not there, or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether a holder is a process of this machine that has ended."""
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
