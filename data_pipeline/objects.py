"""What a store of objects is: keys, ranges, errors; a folder as a store; many small reads as few.

A store is a flat map from keys to immutable byte strings with a version mark (ETag) each.
`data_pipeline.store` adds the S3 one and opens either from a URI.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

# Merged reads stay below this size, so that neighbours still spread over the threads.
_MAX_MERGED = 16 << 20


class StoreError(Exception):
    """A store could not do what it was asked. The message names the object and what to do."""


class MissingKey(StoreError):
    """The bucket or folder exists, the object does not."""


class MissingBucket(StoreError):
    """The bucket or root folder does not exist."""


class AccessDenied(StoreError):
    """There are no credentials, or the server refuses them."""


class ObjectChanged(StoreError):
    """The object is no longer the one whose ETag was asked for or seen first."""


class StoreUnavailable(StoreError):
    """The server kept failing until the attempts were used up. The only error worth waiting on."""


@dataclass(frozen=True)
class ObjectInfo:
    """Size in bytes and the ETag (a version mark, only ever compared for equality)."""

    size: int
    etag: str


@dataclass(frozen=True)
class StoreStats:
    """Counts since the store was opened, over all threads.

    Args:
        requests: HTTP requests sent (each retry is one), or file operations of a folder.
        bytes: payload bytes received, those of broken bodies included.
        written: payload bytes sent.
        resumes: bodies that broke and were taken up again.
    """

    requests: int = 0
    bytes: int = 0
    written: int = 0
    resumes: int = 0


class Span(NamedTuple):
    """`length` bytes of object `key` from `offset`."""

    key: str
    offset: int
    length: int


class Store(Protocol):
    """Objects under one root. Keys are relative to it; every method may be called from any thread.

    Do not share a store over `os.fork`: connections would be used by two processes at once.
    """

    uri: str

    def get(
        self, key: str, offset: int = 0, length: int | None = None, *, etag: str | None = None
    ) -> bytes:
        """Exactly `length` bytes from `offset` (None: all that follow).

        Raises:
            MissingKey, MissingBucket, AccessDenied, StoreUnavailable: as named.
            ObjectChanged: the object's ETag is not `etag`, or changed between two attempts.
            StoreError: the object ends before `offset + length`.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and ETag without the body."""
        ...

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Write a whole object; a reader sees the old one or the new one, never a part."""
        ...

    def put_file(self, key: str, path: str | os.PathLike[str]) -> ObjectInfo:
        """Write a local file as an object without holding it in memory."""
        ...

    def list(self, prefix: str = "") -> list[str]:
        """All keys that start with `prefix`, sorted."""
        ...

    @property
    def stats(self) -> StoreStats:
        """What was asked of the store so far."""
        ...


class Counter:
    """Thread-safe sums behind `StoreStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = StoreStats()

    def add(self, requests: int = 0, received: int = 0, written: int = 0, resumes: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            s = self._stats
            self._stats = StoreStats(
                s.requests + requests, s.bytes + received, s.written + written, s.resumes + resumes
            )

    @property
    def stats(self) -> StoreStats:
        """The counts at this moment."""
        with self._lock:
            return self._stats


def check_key(key: str) -> str:
    """Refuse keys that could leave the root or that S3 and a file system read differently."""
    parts = key.split("/")
    if not key or "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"bad object key {key!r}: use names separated by single '/', without '.', '..', "
            "'\\' or a leading '/'"
        )
    return key


def check_range(offset: int, length: int | None) -> None:
    """Refuse negative numbers, which Python's own slices would take for something else."""
    if offset < 0 or (length is not None and length < 0):
        raise ValueError(f"bad byte range: offset {offset}, length {length}; both must be >= 0")


def short_object(where: str, offset: int, length: int, got: int) -> StoreError:
    """The error of a read past the end."""
    return StoreError(
        f"{where}: expected {length} bytes from offset {offset}, the object holds only {got} of "
        "them; the index does not belong to this object, ingest the source again"
    )


def object_changed(where: str, etag: str) -> ObjectChanged:
    """The error of a read whose version is gone."""
    return ObjectChanged(
        f"{where}: expected the version with ETag {etag}, the object was overwritten since; "
        "read the source's manifest again and restart, or restore the object"
    )


def access_denied(where: str, reason: str) -> AccessDenied:
    """The error of missing or refused credentials."""
    return AccessDenied(
        f"{where}: access denied ({reason}); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or "
        "the profile, and that they may read and write here"
    )


class FolderStore:
    """A folder as a store: the same contract without a server. Writes are atomic renames."""

    _TEMPORARY = ".part-"

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).expanduser().resolve()
        self.uri = str(self.root)
        self._counter = Counter()

    def __repr__(self) -> str:
        return f"FolderStore({self.uri!r})"

    @property
    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        return self._counter.stats

    def _path(self, key: str) -> Path:
        # resolve() follows links: a link inside the root must not be a way out of it.
        path = (self.root / check_key(key)).resolve()
        if not path.is_relative_to(self.root):
            raise ValueError(f"bad object key {key!r}: it leads out of {self.uri}")
        return path

    def _missing(self, key: str) -> StoreError:
        if not self.root.is_dir():
            return MissingBucket(f"{self.uri}: no such folder; create it or correct the path")
        return MissingKey(f"{self.uri}/{key}: no such object; check the name, or ingest it first")

    @staticmethod
    def _info(status: os.stat_result) -> ObjectInfo:
        return ObjectInfo(
            status.st_size, f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'
        )

    def get(
        self, key: str, offset: int = 0, length: int | None = None, *, etag: str | None = None
    ) -> bytes:
        """See `Store.get`."""
        check_range(offset, length)
        self._counter.add(requests=1)
        try:
            with self._path(key).open("rb") as file:
                info = self._info(os.fstat(file.fileno()))
                if etag is not None and info.etag != etag:
                    raise object_changed(f"{self.uri}/{key}", etag)
                file.seek(offset)
                data = file.read() if length is None else file.read(length)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise self._missing(key) from None
        except PermissionError:
            raise access_denied(f"{self.uri}/{key}", "the file may not be read") from None
        self._counter.add(received=len(data))
        if length is not None and len(data) != length:
            raise short_object(f"{self.uri}/{key}", offset, length, len(data))
        return data

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        self._counter.add(requests=1)
        path = self._path(key)
        if not path.is_file():
            raise self._missing(key)
        return self._info(path.stat())

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `Store.put`."""
        return self._write(key, lambda: iter((data,)))

    def put_file(self, key: str, path: str | os.PathLike[str]) -> ObjectInfo:
        """See `Store.put_file`."""

        def pieces() -> Iterator[bytes]:
            with open(path, "rb") as source:
                while piece := source.read(1 << 20):
                    yield piece

        return self._write(key, pieces)

    def _write(self, key: str, pieces: Callable[[], Iterator[bytes]]) -> ObjectInfo:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=self._TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                written = sum(file.write(piece) for piece in pieces())
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # temporary files are private; a corpus is shared
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._counter.add(requests=1, written=written)
        return self._info(path.stat())

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        self._counter.add(requests=1)
        if not self.root.is_dir():
            raise self._missing(prefix)
        files = (
            Path(folder, name).relative_to(self.root).as_posix()
            for folder, _, names in os.walk(self.root)
            for name in names
            if not name.startswith(self._TEMPORARY)
        )
        return sorted(key for key in files if key.startswith(prefix))


def get_many(
    store: Store, requests: Sequence[Span], max_gap: int = 65536, threads: int = 8
) -> list[bytes]:
    """Read many spans with few requests; the answers come in the order of `requests`.

    Spans of one object that overlap or lie at most `max_gap` bytes apart share one ranged read.
    The first error stops what has not started and is raised.

    Returns:
        One `bytes` per request, of exactly its length.
    """
    groups = _merge(requests, max_gap)
    if len(groups) <= 1 or threads <= 1:
        bodies = [store.get(*span) for span, _ in groups]
    else:
        with ThreadPoolExecutor(min(threads, len(groups))) as pool:
            futures = [pool.submit(store.get, *span) for span, _ in groups]
            try:
                bodies = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    answers = [b""] * len(requests)
    for (merged, members), body in zip(groups, bodies, strict=True):
        for i in members:
            start = requests[i].offset - merged.offset
            answers[i] = body[start : start + requests[i].length]
    return answers


def _merge(requests: Sequence[Span], max_gap: int) -> list[tuple[Span, list[int]]]:
    """Group spans by object and neighbourhood: (the span to read, which requests it answers)."""
    groups: list[tuple[Span, list[int]]] = []
    wanted = [i for i, span in enumerate(requests) if span.length]
    for i in sorted(wanted, key=lambda i: requests[i]):
        span = requests[i]
        if groups and groups[-1][0].key == span.key:
            last = groups[-1][0]
            end = max(last.offset + last.length, span.offset + span.length)
            near = span.offset - (last.offset + last.length) <= max_gap
            inside = end == last.offset + last.length
            if inside or (near and end - last.offset <= _MAX_MERGED):
                groups[-1] = (Span(last.key, last.offset, end - last.offset), groups[-1][1])
                groups[-1][1].append(i)
                continue
        groups.append((span, [i]))
    return groups
