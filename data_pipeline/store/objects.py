"""Store interface and its errors, the folder store, and merging of small reads into large ones.

A store is a flat map from keys to immutable byte strings, each with a version mark (ETag).
`store.open` adds the S3 store and opens any store from a URI.
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
"""Maximum gap in bytes between two spans of an object that share one read."""
# Merged reads stay below this size, so that large groups still use several threads.
_MAX_MERGED = 16 << 20
# Piece size in memory when an object is hashed while it is written to a folder.
_PIECE = 4 << 20


class StoreError(Exception):
    """An operation of a store failed. The message names the object and the remedy."""


class MissingKey(StoreError):
    """The bucket or folder exists, but the object does not."""


class MissingBucket(StoreError):
    """The bucket or root folder does not exist."""


class AccessDenied(StoreError):
    """Credentials are missing, or the server refuses them."""


class ObjectChanged(StoreError):
    """The object no longer has the ETag that was requested or seen first.

    Attributes:
        etag: the expected ETag; "" if unknown.
    """

    etag = ""


class RequestRefused(StoreError):
    """The server refuses the request in this form; it may accept it without a header."""


class NotSupported(RequestRefused):
    """The server does not support the operation or one of its headers."""


class StoreUnavailable(StoreError):
    """All attempts failed with transient errors. Only this error is worth a later retry."""


class WrongBytes(StoreError):
    """The bytes to write do not have the expected hash; nothing was written.

    Attributes:
        found: actual SHA-256 (hex) of the bytes.
    """

    def __init__(self, where: str, found: str, expected: str) -> None:
        super().__init__(
            f"{where}: what was to be written has sha256 {found}, expected {expected}; nothing was "
            "written"
        )
        self.found = found


@dataclass(frozen=True)
class ObjectInfo:
    """Size in bytes, and ETag (a version mark that is only compared for equality)."""

    size: int
    etag: str


@dataclass(frozen=True)
class Written:
    """Result of writing an object.

    Args:
        info: size and ETag.
        sha256: SHA-256 (hex) of the bytes sent.
        confirmed: True if the store compared the received bytes with our checksums; otherwise a
            caller must read the object again to be sure.
    """

    info: ObjectInfo
    sha256: str
    confirmed: bool


class Unfinished(NamedTuple):
    """Storage that is not an object: leftovers of a killed writer, or an older version.

    Attributes:
        key: key of the object; in a folder, the key of the temporary file.
        mark: distinguishes entries with the same key.
        size: size in bytes, if the store reports it.
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

    Do not share a store across `os.fork`, because two processes would use the same connections.
    """

    uri: str

    def get(
        self, key: str, offset: int = 0, length: int | None = None, *, etag: str | None = None
    ) -> bytes:
        """Return exactly `length` bytes from `offset`; None returns all remaining bytes.

        Raises:
            MissingKey, MissingBucket, AccessDenied, StoreUnavailable: as named.
            ObjectChanged: the object's ETag is not `etag`, or it changed between two attempts.
                Without `etag`, S3 and memory stores also raise it if the object differs from the
                version they read first. To read a changing object, pass the ETag of `head`.
            StoreError: the object ends before `offset + length`.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return size and ETag without reading the body."""
        ...

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Write a whole object; a reader sees the old or the new one, never a part."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Write a whole object unless the key exists; return whether it was written.

        Only one of several concurrent writers succeeds. S3 uses If-None-Match. The result may be
        wrong if the server does not support it, or if a connection broke after the object was
        written; read the object again to be sure. False does not say who wrote the object.
        """
        ...

    def put_file(
        self,
        key: str,
        path: str | os.PathLike[str],
        sent: Callable[[int], None] | None = None,
    ) -> ObjectInfo:
        """Write a local file as an object without holding it in memory.

        `sent` is called with numbers of bytes that have arrived, possibly from several threads.
        """
        ...

    def put_verified(
        self, key: str, size: int, sha256: str | None, read: Callable[[int, int], bytes]
    ) -> Written:
        """Write an object that is read piece by piece, if it has the expected SHA-256.

        Memory holds one or two pieces. If the hash differs, no part of the object becomes visible.

        Args:
            key: key of the object.
            size: size of the object in bytes.
            sha256: expected hash (hex); None accepts any.
            read: called as read(offset, length), in order of offset; returns these bytes.

        Raises:
            WrongBytes: the bytes have another hash.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object if it exists."""
        ...

    def delete_versions(self, key: str) -> int:
        """Remove an object with all its versions and return the number of removed versions.

        Raises:
            AccessDenied: an object lock protects a version, or this user may not remove it.
        """
        ...

    def discard(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        """Remove objects with all versions in bulk; missing keys are allowed.

        Returns:
            (key, reason) of objects that the store did not remove because of a lock or rights.
        """
        ...

    def unfinished(self, prefix: str = "") -> list[Unfinished]:
        """Return leftovers of killed writers under a prefix, sorted: uploads, temporary files."""
        ...

    def drop_unfinished(self, one: Unfinished) -> None:
        """Remove a leftover of a killed writer, unless another one has replaced it."""
        ...

    def bygone(self, prefix: str = "") -> list[Unfinished]:
        """Return the stored versions of deleted objects under a prefix, sorted."""
        ...

    def drop_bygone(self, ones: Sequence[Unfinished]) -> list[tuple[str, str]]:
        """Remove versions of deleted objects; return (key, reason) of those not removed."""
        ...

    def list_folders(self, prefix: str = "") -> list[str]:
        """Return the folders whose names start with `prefix`, sorted and without duplicates.

        A folder name is the part of a key before the next "/" after the prefix: of "a/b1/x",
        "a/b2/y/z" and "a/b3" with the prefix "a/b", the folders are "a/b1" and "a/b2". The cost
        depends on the number of folders, because the keys inside them are not listed.
        """
        ...

    def list(self, prefix: str = "") -> list[str]:
        """Return all keys that start with `prefix`, sorted."""
        ...

    def close(self) -> None:
        """End threads and connections. A read that waits for a retry ends with an error."""
        ...

    @property
    def stats(self) -> StoreStats:
        """Counts of the requests so far."""
        ...


class Versions:
    """ETag of each object at its first read, used to detect overwritten objects.

    Args:
        limit: maximum number of keys. Beyond it, the least recently read key is dropped, and a
            change of that object is no longer detected.
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
        """Record a version written by this store as the expected one."""
        with self._lock:
            if key in self._first:
                self._first[key] = etag


def check_key(key: str) -> str:
    """Refuse keys that could leave the root, or that S3 and file systems interpret differently."""
    parts = key.split("/")
    if not key or "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"bad object key {key!r}: use names separated by single '/', without '.', '..', "
            "'\\' or a leading '/'"
        )
    return key


def check_range(offset: int, length: int | None) -> None:
    """Refuse negative numbers, because Python slices would count them from the end."""
    if offset < 0 or (length is not None and length < 0):
        raise ValueError(f"bad byte range: offset {offset}, length {length}; both must be >= 0")


def short_object(where: str, offset: int, length: int, got: int) -> StoreError:
    """Return the error for a read past the end."""
    return StoreError(
        f"{where}: expected {length} bytes from offset {offset}, the object holds only {got} of "
        "them; the index does not belong to this object, ingest the source again"
    )


def object_changed(where: str, etag: str) -> ObjectChanged:
    """Return the error for a read of a version that no longer exists."""
    error = ObjectChanged(
        f"{where}: expected the version with ETag {etag}, the object was overwritten since; "
        "read the source's manifest again and restart, or restore the object"
    )
    error.etag = etag
    return error


def same_version(one: str, other: str) -> bool:
    """Return whether two ETags are equal, ignoring "W/" and quotes, which a proxy may change."""
    return one.removeprefix("W/").strip('"') == other.removeprefix("W/").strip('"')


class CheckedPieces:
    """Iterable of the pieces of an object that hashes them and raises at the end on a mismatch.

    Args:
        where: name of the object, for messages.
        size: size of the object in bytes.
        expected: expected SHA-256 (hex); None accepts any.
        read: as in `Store.put_verified`.
        step: bytes per piece.

    Attributes:
        sha256: hash of all pieces, set after the iteration.
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
    """Return the error for missing or refused credentials."""
    return AccessDenied(
        f"{where}: access denied ({reason}); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or "
        "the profile, and that they may read and write here"
    )


class FolderStore(Counted):
    """Store in a folder, with the same contract and without a server. Writes are atomic renames.

    Its ETags come from inode and time, which differ after a copy of the same bytes. Therefore it
    does not remember them between reads; readers detect an overwritten file by their checksums.

    Args:
        root: the folder.
        patience: seconds for which reads are retried while the file system is unavailable.
    """

    _TEMPORARY = ".part-"

    def __init__(self, root: str | os.PathLike[str], patience: float = 120.0) -> None:
        super().__init__()
        self._patience = patience
        self.root = Path(root).expanduser().resolve()
        self.uri = str(self.root)

    def close(self) -> None:
        """See `Store.close`; there is nothing to close."""

    def _path(self, key: str) -> Path:
        # resolve() follows links, because a link inside the root must not lead out of it.
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
        """Call `read`, with retries while the file system is unavailable."""
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
        """Remove the temporary files of killed writers in a folder of the root.

        Such files are not visible as objects, but each may be as large as a shard. Call this only
        if no other process writes to the folder.
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
            # tempfile would make a private file, but the umask must decide who may read a corpus.
            with temporary.open("xb") as file:
                written = sum(file.write(piece) for piece in pieces())
                file.flush()
                os.fsync(file.fileno())
            (show or os.replace)(temporary, path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno and error.filename is None:
                error.filename = str(path)  # the error of a full disk lacks the name
            raise
        self.count(requests=1, written=written)
        return self._info(path.stat())

    def delete(self, key: str) -> None:
        """See `Store.delete`. As in S3, an empty folder does not exist, so it is removed too."""
        self.count(requests=1)
        path = self._path(key)
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()

    def delete_versions(self, key: str) -> int:
        """See `Store.delete_versions`; a folder keeps one version."""
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
                    with suppress(FileNotFoundError):  # its writer has just renamed it
                        found.append(Unfinished(key, self._info(Path(inside, name).stat()).etag))
        return sorted(found)

    def drop_unfinished(self, one: Unfinished) -> None:
        """See `Store.drop_unfinished`."""
        path = self._path(one.key)
        with suppress(FileNotFoundError):
            if self._info(path.stat()).etag == one.mark:
                path.unlink()

    def bygone(self, prefix: str = "") -> list[Unfinished]:
        """See `Store.bygone`; a folder keeps no old versions."""
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
            # As in S3, only folders with objects in them exist.
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
        """Yield all object files at any depth below a folder."""
        for inside, _, names in os.walk(folder, onerror=_refuse_away):
            for name in names:
                if not name.startswith(self._TEMPORARY):
                    yield Path(inside, name)


def _refuse_away(error: OSError) -> None:
    """Raise if the file system is unavailable, because an unread folder is not an empty one."""
    if error.errno in AWAY:
        raise error


def _link(temporary: Path, path: Path) -> None:
    """Give a complete file its final name; raise FileExistsError if the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links here, so a reader may see an empty file for a moment
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.replace(temporary, path)
        return
    os.unlink(temporary)


def get_many(
    store: Store, requests: Sequence[Span], max_gap: int = MAX_GAP, threads: int = 8
) -> list[bytes]:
    """Read many spans with few requests; results are in the order of `requests`.

    Spans of one object that overlap or are at most `max_gap` bytes apart share one ranged read. The
    first error cancels reads that have not started and is raised.

    Returns:
        One `bytes` per request with exactly its length. A span that equals a read is not copied.
    """
    groups, parts = merge_spans(requests, max_gap)
    bodies = in_threads(lambda group: store.get(*group), groups, threads)
    answers = [b""] * len(requests)
    for number, group, start, stop in parts:
        answers[number] = bodies[group][start:stop]
    return answers


def in_threads(work: Callable[[T], U], items: Sequence[T], threads: int) -> list[U]:
    """Call `work` for all items; the first error cancels calls that have not started."""
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
    """Merge neighbouring spans of the same object.

    Returns:
        The spans to read, sorted; and for each request of at least 1 byte, its number, the number
        of the span that contains it, and its start and stop in that span.
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
    """Return the spans that begin a new read, by the rule of `get_many`.

    Args:
        key, begin, length: object and byte range of each span, [spans] each, sorted by object, then
            by begin. There must be at least one span, and lengths must be at least 1.

    Returns:
        Numbers of the first spans of the reads, [reads]; and for each span, the furthest end of the
        spans of its object so far, [spans].
    """
    reach = begin + length  # becomes the furthest end so far, per object
    objects = [0, *(np.flatnonzero(np.diff(key)) + 1).tolist(), len(key)]
    for low, high in zip(objects, objects[1:]):
        np.maximum.accumulate(reach[low:high], out=reach[low:high])
    apart = (np.diff(key) != 0) | (begin[1:] - reach[:-1] > max_gap)
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return _cut_long(first, begin, reach), reach


def _cut_long(
    first: NDArray[np.int64], begin: NDArray[np.int64], reach: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the starts of the groups after cutting groups that are too long for one read.

    Args:
        first: first span of each group before cutting, [groups].
        begin, reach: begin and furthest end of all spans, [spans].
    """
    stop = np.append(first[1:], len(begin))
    cuts = [first]
    for number in np.flatnonzero(reach[stop - 1] - begin[first] > _MAX_MERGED).tolist():
        low, high = int(first[number]), int(stop[number])
        while True:
            # A span inside the bytes that are read anyway is free; cut only where the reach grows.
            limit = max(begin[low] + _MAX_MERGED, reach[low])
            low += int(np.searchsorted(reach[low:high], limit, side="right"))
            if low == high:
                break
            cuts.append(np.array([low]))
    return np.sort(np.concatenate(cuts))
