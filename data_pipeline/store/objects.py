"""What a store of objects is: keys, ranges, errors; a folder as a store; many small reads as few.

A store is a flat map from keys to immutable byte strings with a version mark (ETag) each.
`store.open` adds the S3 one and opens any of them from a URI.
"""

import hashlib
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.store.patient import AWAY, patiently
from data_pipeline.store.plain_file import SpecialFile, open_plain
from data_pipeline.store.stats import Counted, StoreStats

T = TypeVar("T")
U = TypeVar("U")

MAX_GAP = 65536
"""Bytes between two spans of an object up to which one read has both."""
# Merged reads stay below this size, so that neighbours still spread over the threads.
_MAX_MERGED = 16 << 20
# Of an object that is hashed on its way into a folder: so much is in memory.
_PIECE = 4 << 20


class StoreError(Exception):
    """A store could not do what it was asked. The message names the object and what to do."""


class MissingKey(StoreError):
    """The bucket or folder exists, the object does not."""


class MissingBucket(StoreError):
    """The bucket or root folder does not exist."""


class AccessDenied(StoreError):
    """There are no credentials, or the server refuses them."""


class ObjectChanged(StoreError):
    """The object is no longer the one whose ETag was asked for or seen first.

    Attributes:
        etag: that ETag; "" if it is not known.
    """

    etag = ""


class RequestRefused(StoreError):
    """The server refuses the request as it stands; without a header it may take it."""


class NotSupported(RequestRefused):
    """The server does not know the operation, or a header of it."""


class StoreUnavailable(StoreError):
    """The server kept failing until the attempts were used up. The only error worth waiting on."""


class WrongBytes(StoreError):
    """Bytes to be written do not have the hash that they should have; nothing was written.

    Attributes:
        found: SHA-256 (hex) that they have.
    """

    def __init__(self, where: str, found: str, expected: str) -> None:
        super().__init__(
            f"{where}: what was to be written has sha256 {found}, expected {expected}; nothing was "
            "written"
        )
        self.found = found


@dataclass(frozen=True)
class ObjectInfo:
    """Size in bytes and the ETag (a version mark, only ever compared for equality)."""

    size: int
    etag: str


@dataclass(frozen=True)
class Written:
    """An object that was written, its SHA-256 (hex) as it was sent.

    Args:
        info: size and ETag.
        sha256: of what was sent.
        confirmed: whether the store compared what arrived with checksums of ours; else who wants to
            be sure reads it again.
    """

    info: ObjectInfo
    sha256: str
    confirmed: bool


class Unfinished(NamedTuple):
    """What is no object and costs what it holds: left by a killed writer, or an older version.

    Attributes:
        key: of the object that it was or was to become; of a folder that of the temporary file.
        mark: tells it from another one of the same key.
        size: its bytes, where the store tells them.
    """

    key: str
    mark: str
    size: int = 0


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
            ObjectChanged: the object's ETag is not `etag`, or changed between two attempts. S3 and
                memory stores also notice, without `etag`, that the object is no longer the one
                that they read first; to follow an object that changes, pass the ETag of `head`.
            StoreError: the object ends before `offset + length`.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and ETag without the body."""
        ...

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Write a whole object; a reader sees the old one or the new one, never a part."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Write a whole object unless there is one of this key; returns whether it was written.

        Of several writers at once one succeeds. S3 does it by If-None-Match; where a server does
        not know that, or a connection broke after the object was written, the answer may be wrong:
        who must be sure reads the object again. False says nothing of who wrote it.
        """
        ...

    def put_file(
        self,
        key: str,
        path: str | os.PathLike[str],
        sent: Callable[[int], None] | None = None,
    ) -> ObjectInfo:
        """Write a local file as an object without holding it in memory.

        `sent` is called with so many bytes that have arrived, perhaps from several threads.
        """
        ...

    def put_verified(
        self, key: str, size: int, sha256: str | None, read: Callable[[int, int], bytes]
    ) -> Written:
        """Write an object that is read piece by piece, and only if it has the right SHA-256.

        Memory holds a piece or two. Of an object with other bytes nothing becomes visible.

        Args:
            key: of the object.
            size: its bytes.
            sha256: its hash (hex); None: whatever it has.
            read: returns so many bytes (second) from an offset (first); called in order.

        Raises:
            WrongBytes: they have another hash.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        ...

    def delete_versions(self, key: str) -> int:
        """Remove an object with all versions that the store keeps of it; returns how many went.

        Raises:
            AccessDenied: the store holds a version (object lock), or this user may not remove it.
        """
        ...

    def discard(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        """Remove objects with all versions, many at a time; those that are gone already, too.

        Returns:
            (key, reason) of those that the store did not let go: a lock, or missing rights.
        """
        ...

    def unfinished(self, prefix: str = "") -> list[Unfinished]:
        """What killed writers left under a prefix, sorted: uploads in parts, temporary files."""
        ...

    def drop_unfinished(self, one: Unfinished) -> None:
        """Remove what a killed writer left, if it is still that one."""
        ...

    def bygone(self, prefix: str = "") -> list[Unfinished]:
        """Versions that the store keeps of objects that were deleted, under a prefix; sorted."""
        ...

    def drop_bygone(self, ones: Sequence[Unfinished]) -> list[tuple[str, str]]:
        """Remove such versions; (key, reason) of those that the store did not let go."""
        ...

    def list_folders(self, prefix: str = "") -> list[str]:
        """What stands before the next "/" of keys that start with `prefix`: sorted, each once.

        Of "a/b1/x", "a/b2/y/z" and "a/b3" with the prefix "a/b" these are "a/b1" and "a/b2". Their
        number is what it costs: the keys in them are not listed.
        """
        ...

    def list(self, prefix: str = "") -> list[str]:
        """All keys that start with `prefix`, sorted."""
        ...

    def close(self) -> None:
        """End threads and connections. A read that waits to be tried again ends with an error."""
        ...

    @property
    def stats(self) -> StoreStats:
        """What was asked of the store so far."""
        ...


class Versions:
    """The ETag under which each object was first read: one that is overwritten must be noticed.

    Args:
        limit: keys kept; the one not read for longest is forgotten, and with it that it changed.
    """

    def __init__(self, limit: int = 65536) -> None:
        self._lock = threading.Lock()
        self._first: OrderedDict[str, str] = OrderedDict()
        self._limit = limit

    def check(self, uri: str, key: str, etag: str) -> None:
        """Raise ObjectChanged if `key` of the store at `uri` was first read under another ETag."""
        with self._lock:
            first = self._first.setdefault(key, etag)
            self._first.move_to_end(key)
            if len(self._first) > self._limit:
                self._first.popitem(last=False)
        if not same_version(first, etag):
            raise object_changed(f"{uri}/{key}", first)

    def wrote(self, key: str, etag: str) -> None:
        """Take the version that this store wrote itself for the first one."""
        with self._lock:
            if key in self._first:
                self._first[key] = etag


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
    error = ObjectChanged(
        f"{where}: expected the version with ETag {etag}, the object was overwritten since; "
        "read the source's manifest again and restart, or restore the object"
    )
    error.etag = etag
    return error


def same_version(one: str, other: str) -> bool:
    """Whether two ETags mean the same: a proxy may have made one weak, or dropped its quotes."""
    return one.removeprefix("W/").strip('"') == other.removeprefix("W/").strip('"')


class CheckedPieces:
    """Pieces of an object to be written, hashed on their way; the end of wrong ones is an error.

    Args:
        where: names the object in the message.
        size: its bytes.
        expected: its SHA-256 (hex); None: whatever it has.
        read: as of `Store.put_verified`.
        step: bytes of a piece.

    Attributes:
        sha256: of all pieces, once they were taken.
    """

    def __init__(
        self,
        where: str,
        size: int,
        expected: str | None,
        read: Callable[[int, int], bytes],
        step: int,
    ) -> None:
        self._where, self._size, self._expected = where, size, expected
        self._read, self._step, self.sha256 = read, step, ""

    def __iter__(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        for offset in range(0, self._size, self._step):
            piece = self._read(offset, min(self._step, self._size - offset))
            digest.update(piece)
            yield piece
        self.sha256 = digest.hexdigest()
        if self._expected not in (None, self.sha256):
            raise WrongBytes(self._where, self.sha256, self._expected)


def access_denied(where: str, reason: str) -> AccessDenied:
    """The error of missing or refused credentials."""
    return AccessDenied(
        f"{where}: access denied ({reason}); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or "
        "the profile, and that they may read and write here"
    )


class FolderStore(Counted):
    """A folder as a store: the same contract without a server. Writes are atomic renames.

    Its ETags come from inode and time, which differ after a copy of the same bytes. Therefore it
    does not remember them by itself: a reader's checksums see a file that was overwritten.

    Args:
        root: the folder.
        patience: seconds for which reads are tried again while its file system is away.
    """

    _TEMPORARY = ".part-"

    def __init__(self, root: str | os.PathLike[str], patience: float = 120.0) -> None:
        super().__init__()
        self._patience = patience
        self.root = Path(root).expanduser().resolve()
        self.uri = str(self.root)

    def close(self) -> None:
        """See `Store.close`; a folder holds nothing open."""

    def _path(self, key: str) -> Path:
        # resolve() follows links: a link inside the root must not be a way out of it.
        path = (self.root / check_key(key)).resolve()
        if not path.is_relative_to(self.root):
            raise ValueError(f"bad object key {key!r}: it leads out of {self.uri}")
        return path

    def _missing(self, key: str) -> StoreError:
        if not self._again(self.root.is_dir, ""):
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
        self.count(requests=1)

        def read() -> bytes:
            with open_plain(self._path(key)) as file:
                info = self._info(os.fstat(file.fileno()))
                if etag is not None and info.etag != etag:
                    raise object_changed(f"{self.uri}/{key}", etag)
                file.seek(offset)
                return file.read() if length is None else file.read(length)

        try:
            data = self._again(read, key)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise self._missing(key) from None
        except SpecialFile as error:
            raise MissingKey(f"{self.uri}/{key}: {error.strerror}, and restore the file") from None
        except PermissionError:
            raise access_denied(f"{self.uri}/{key}", "the file may not be read") from None
        self.count(bytes=len(data))
        if length is not None and len(data) != length:
            raise short_object(f"{self.uri}/{key}", offset, length, len(data))
        return data

    def _again(self, read: Callable[[], T], key: str) -> T:
        """Read, again while the file system is away."""
        where = f"{self.uri}/{key}".rstrip("/")
        try:
            return patiently(read, where, self._patience)
        except OSError as error:
            if error.errno not in AWAY:
                raise
            raise StoreUnavailable(
                f"{where}: {error.strerror}; check the disk or file server, then run again"
            ) from error

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        self.count(requests=1)
        path = self._path(key)
        info = self._again(lambda: self._info(path.stat()) if path.is_file() else None, key)
        if info is None:
            raise self._missing(key)
        return info

    def remove_unfinished(self, folder: str) -> None:
        """Remove what writers that were killed left behind in a folder of the root.

        Nobody sees such files as objects, but each may be as large as a shard. Only for a folder
        that no one else is writing to.
        """
        for path in Path(self.root, folder).glob(f"{self._TEMPORARY}*"):
            path.unlink(missing_ok=True)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `Store.put`."""
        return self._write(key, lambda: iter((data,)))

    def put_new(self, key: str, data: bytes) -> bool:
        """See `Store.put_new`."""
        try:
            self._write(key, lambda: iter((data,)), _link)
        except FileExistsError:
            return False
        return True

    def put_file(
        self,
        key: str,
        path: str | os.PathLike[str],
        sent: Callable[[int], None] | None = None,
    ) -> ObjectInfo:
        """See `Store.put_file`."""

        def pieces() -> Iterator[bytes]:
            with open(path, "rb") as source:
                while piece := source.read(1 << 20):
                    yield piece
                    if sent is not None:
                        sent(len(piece))

        return self._write(key, pieces)

    def put_verified(
        self, key: str, size: int, sha256: str | None, read: Callable[[int, int], bytes]
    ) -> Written:
        """See `Store.put_verified`."""
        pieces = CheckedPieces(f"{self.uri}/{key}", size, sha256, read, _PIECE)
        info = self._write(key, lambda: iter(pieces))
        return Written(info, pieces.sha256, confirmed=False)

    def _write(
        self,
        key: str,
        pieces: Callable[[], Iterator[bytes]],
        show: Callable[[Path, Path], object] | None = None,
    ) -> ObjectInfo:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{self._TEMPORARY}{secrets.token_hex(8)}"
        try:
            # Not a private file of tempfile's: a corpus is shared as far as the umask lets it be.
            with temporary.open("xb") as file:
                written = sum(file.write(piece) for piece in pieces())
                file.flush()
                os.fsync(file.fileno())
            (show or os.replace)(temporary, path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno and error.filename is None:
                error.filename = str(path)  # a full disk is told without it
            raise
        self.count(requests=1, written=written)
        return self._info(path.stat())

    def delete(self, key: str) -> None:
        """See `Store.delete`. As in S3, a folder is there only while it holds something."""
        self.count(requests=1)
        path = self._path(key)
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()

    def delete_versions(self, key: str) -> int:
        """See `Store.delete_versions`; a folder keeps one."""
        there = self._path(key).is_file()
        self.delete(key)
        return int(there)

    def discard(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        """See `Store.discard`."""
        kept = []
        for key in keys:
            try:
                self.delete(key)
            except PermissionError:
                kept.append((key, "the file may not be removed"))
        return kept

    def unfinished(self, prefix: str = "") -> list[Unfinished]:
        """See `Store.unfinished`."""
        found = []
        for inside, _, names in os.walk(self.root, onerror=_refuse_away):
            for name in names:
                key = Path(inside, name).relative_to(self.root).as_posix()
                if name.startswith(self._TEMPORARY) and key.startswith(prefix):
                    with suppress(FileNotFoundError):  # it has just become an object
                        found.append(Unfinished(key, self._info(Path(inside, name).stat()).etag))
        return sorted(found)

    def drop_unfinished(self, one: Unfinished) -> None:
        """See `Store.drop_unfinished`."""
        path = self._path(one.key)
        with suppress(FileNotFoundError):
            if self._info(path.stat()).etag == one.mark:
                path.unlink()

    def bygone(self, prefix: str = "") -> list[Unfinished]:
        """See `Store.bygone`; a folder keeps none."""
        return []

    def drop_bygone(self, ones: Sequence[Unfinished]) -> list[tuple[str, str]]:
        """See `Store.drop_bygone`."""
        return []

    def list_folders(self, prefix: str = "") -> list[str]:
        """See `Store.list_folders`."""
        self.count(requests=1)
        if not self._again(self.root.is_dir, ""):
            raise self._missing(prefix)
        above, slash, begin = prefix.rpartition("/")
        folder = self._path(above) if above else self.root

        def read() -> list[str]:
            with os.scandir(folder) as entries:
                found = [
                    e
                    for e in entries
                    if e.name.startswith(begin) and e.is_dir(follow_symlinks=False)
                ]
            # As in S3, a folder is there only while it holds something.
            return [f"{above}{slash}{e.name}" for e in found if any(self._files(Path(e.path)))]

        try:
            return sorted(self._again(read, prefix))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        self.count(requests=1)
        if not self._again(self.root.is_dir, ""):
            raise self._missing(prefix)
        files = self._again(lambda: list(self._files(self.root)), prefix)
        keys = (path.relative_to(self.root).as_posix() for path in files)
        return sorted(key for key in keys if key.startswith(prefix))

    def _files(self, folder: Path) -> Iterator[Path]:
        """All objects at any depth of a folder."""
        for inside, _, names in os.walk(folder, onerror=_refuse_away):
            for name in names:
                if not name.startswith(self._TEMPORARY):
                    yield Path(inside, name)


def _refuse_away(error: OSError) -> None:
    """Raise where a file system is away: a folder that was not read is no empty one."""
    if error.errno in AWAY:
        raise error


def _link(temporary: Path, path: Path) -> None:
    """Give a whole file its name, unless that is taken (FileExistsError)."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: a reader may find it empty for a moment
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.replace(temporary, path)
        return
    os.unlink(temporary)


def get_many(
    store: Store, requests: Sequence[Span], max_gap: int = MAX_GAP, threads: int = 8
) -> list[bytes]:
    """Read many spans with few requests; the answers come in the order of `requests`.

    Spans of one object that overlap or lie at most `max_gap` bytes apart share one ranged read.
    The first error stops what has not started and is raised.

    Returns:
        One `bytes` per request, of exactly its length. A span that is a whole read is not copied.
    """
    groups, parts = merge_spans(requests, max_gap)
    bodies = in_threads(lambda group: store.get(*group), groups, threads)
    answers = [b""] * len(requests)
    for number, group, start, stop in parts:
        answers[number] = bodies[group][start:stop]
    return answers


def in_threads(work: Callable[[T], U], items: Sequence[T], threads: int) -> list[U]:
    """Do `work` for all items; the first error stops what has not started and is raised."""
    if len(items) <= 1 or threads <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def merge_spans(
    requests: Sequence[Span], max_gap: int
) -> tuple[list[Span], Iterable[tuple[int, int, int, int]]]:
    """Group spans by object and neighbourhood.

    Returns:
        The spans to read, sorted; and for each request of 1 byte and more: its number, the number
        of the span that holds it, where it starts and stops in that span.
    """
    keys, begins, lengths = zip(*requests) if requests else ((), (), ())
    begin, length = np.asarray(begins, np.int64), np.asarray(lengths, np.int64)
    names = sorted(set(keys))
    rank = {name: number for number, name in enumerate(names)}
    key = np.fromiter(map(rank.__getitem__, keys), np.int64, len(keys))
    order = np.lexsort((length, begin, key))
    order = order[length[order] > 0]
    if not len(order):
        return [], ()
    key, begin, length = key[order], begin[order], length[order]
    first, reach = range_starts(key, begin, length, max_gap)
    last = np.append(first[1:], len(key)) - 1
    names_of = map(names.__getitem__, key[first].tolist())
    groups = list(map(Span, names_of, begin[first].tolist(), (reach[last] - begin[first]).tolist()))
    group = np.repeat(np.arange(len(first)), last - first + 1)
    start = begin - begin[first][group]
    columns = (order, group, start, start + length)
    return groups, zip(*(column.tolist() for column in columns))


def range_starts(
    key: NDArray[np.int64], begin: NDArray[np.int64], length: NDArray[np.int64], max_gap: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which spans begin a read of their own, by the rule of `get_many`.

    Args:
        key, begin, length: object and bytes of each span, sorted by object, then by begin; lengths
            of 1 and more. One span at least, [spans] each.

    Returns:
        numbers of the first spans of the reads, [reads], and the furthest end of its object's spans
        up to each span, [spans].
    """
    reach = begin + length  # the furthest end up to here, of the same object
    objects = [0, *(np.flatnonzero(np.diff(key)) + 1).tolist(), len(key)]
    for low, high in zip(objects, objects[1:]):
        np.maximum.accumulate(reach[low:high], out=reach[low:high])
    apart = (np.diff(key) != 0) | (begin[1:] - reach[:-1] > max_gap)
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return _cut_long(first, begin, reach), reach


def _cut_long(
    first: NDArray[np.int64], begin: NDArray[np.int64], reach: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Where groups start, when those that are longer than one read should be are cut.

    Args:
        first: where they start before that, [groups].
        begin, reach: of all spans, [spans].
    """
    stop = np.append(first[1:], len(begin))
    cuts = [first]
    for number in np.flatnonzero(reach[stop - 1] - begin[first] > _MAX_MERGED).tolist():
        low, high = int(first[number]), int(stop[number])
        while True:
            # A span inside what is read anyway costs nothing, so only a longer reach is a cut.
            limit = max(begin[low] + _MAX_MERGED, reach[low])
            low += int(np.searchsorted(reach[low:high], limit, side="right"))
            if low == high:
                break
            cuts.append(np.array([low]))
    return np.sort(np.concatenate(cuts))
