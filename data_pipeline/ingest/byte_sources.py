"""Where the bytes of raw inputs are read from: a local file, a store, or a tar in either."""

import errno
import gzip
import io
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, cast

from data_pipeline.ingest.samples import Refused
from data_pipeline.store.addresses import split_place
from data_pipeline.store.objects import check_key
from data_pipeline.store.open import (
    MissingBucket,
    MissingKey,
    Store,
    open_store,
)

# Errors caused by the path in the input; all others are the machine's or, as the right to read, the
# user's: they reject no sample.
INPUT_ERRNOS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.EOVERFLOW),
}
# Objects are streamed in requests of this size, with the next one prefetched.
_BLOCK = 8 << 20
# Most bytes of one sample held in memory, where its files cannot be read again later: a compressed
# tar of a few megabytes may expand to any number of zeros.
MAX_LOADED = 1 << 30


def in_store(where: str) -> bool:
    """Whether `where` is the URI of an object, and not a path."""
    return "://" in where and not where.startswith("file://")


def points_outside(path: str, folder: str) -> bool:
    """Whether a local path, all links followed, is outside of `folder` and exists."""
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([real, root]) != root and os.path.exists(real)


def open_regular(path: str) -> io.BufferedReader:
    """Open a file for reading; a pipe or a device, which may never answer, is an OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


@cache
def _store(root: str) -> Store:
    return open_store(root)


def store_of(uri: str) -> tuple[Store, str]:
    """The store of a bucket, opened once per process, and the key inside it."""
    root, key = _parted(uri)
    return _store(root), key


def _parted(uri: str) -> tuple[str, str]:
    """Return the bucket's URI and the key."""
    scheme, rest = uri.split("://", 1)
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


@dataclass(frozen=True)
class ByteSource:
    """Bytes of a path or URI to be read later, by any process; length None: to the end.

    `data` holds the bytes themselves, where they had to be read already.
    """

    where: str
    offset: int = 0
    length: int | None = None
    data: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes; an estimate where the exact size would take a request."""
        if self.data is not None:
            return len(self.data)
        return 1 << 18 if self.length is None else self.length

    def read(self, most: int) -> bytes:
        """Read the bytes.

        A sample is refused only for what it says itself: a name of nothing, or of too much. What
        the store, its rights or the machine are the reason of ends the ingest.

        Raises:
            Refused: there is no such file or object, or it has more than `most` bytes.
            StoreError, OSError: it cannot be read; of no sample's bytes.
        """
        known = self.length if self.data is None else len(self.data)
        if known is not None and known > most:
            raise self._too_large(known, most)
        if self.data is not None:
            return self.data
        if in_store(self.where):
            return self._from_store(most)
        try:
            with open_regular(self.where) as file:
                size = os.fstat(file.fileno()).st_size
                if self.length is None and size > most:
                    raise self._too_large(size, most)
                file.seek(self.offset)
                return file.read() if self.length is None else file.read(self.length)
        except OSError as error:
            if error.errno not in INPUT_ERRNOS:
                raise
            raise Refused("missing file", f"{self.where}: {error.strerror}") from None
        except ValueError as error:  # no possible path or URI
            raise Refused("missing file", f"{self.where!r}: {error}") from None

    def _from_store(self, most: int) -> bytes:
        """Read an object; a HEAD tells its size first."""
        try:
            root, key = _parted(self.where)
            split_place("a file", root)
            check_key(key)
        except ValueError as error:  # no possible URI
            raise Refused("missing file", f"{self.where!r}: {error}") from None
        store, key = store_of(self.where)
        try:
            if self.length is not None:
                return store.get(key, self.offset, self.length)
            info = store.head(key)
            if info.size - self.offset > most:
                raise self._too_large(info.size - self.offset, most)
            return store.get(key, self.offset, info.size - self.offset, etag=info.etag)
        except (MissingKey, MissingBucket) as error:
            raise Refused("missing file", str(error)) from None

    def _too_large(self, size: int, most: int) -> Refused:
        return Refused("too large", f"{self.where}: {size} bytes, at most {most}")


@dataclass(frozen=True)
class RefusedSource(ByteSource):
    """A member of a tar that is not read: one that is too large to be unpacked, or a link."""

    reason: str = ""
    detail: str = ""

    def read(self, most: int) -> bytes:
        """See `ByteSource.read`."""
        raise Refused(self.reason, self.detail)


@dataclass(frozen=True)
class OpenedInput:
    """A seekable file, and JSON that identifies its version."""

    file: IO[bytes]
    version: dict[str, Any]


@contextmanager
def open_input(where: str) -> Iterator[OpenedInput]:
    """Open a path or an object for reading; ".gz" and ".tgz" are decompressed.

    Raises:
        FileNotFoundError, MissingKey: as named.
    """
    with io.BufferedReader(_ObjectFile(where)) if in_store(where) else open_regular(where) as file:
        if isinstance(file.raw, _ObjectFile):
            version = {"size": file.raw.info.size, "etag": file.raw.info.etag}
        else:
            status = os.fstat(file.fileno())
            version = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        if where.endswith((".gz", ".tgz")):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield OpenedInput(cast("IO[bytes]", unpacked), version)
        else:
            yield OpenedInput(file, version)


class _ObjectFile(io.RawIOBase):
    """An object as a file; every read is of the same version."""

    def __init__(self, uri: str) -> None:
        self._store, self._key = store_of(uri)
        self.info = self._store.head(self._key)
        self._at = 0
        self._pool = ThreadPoolExecutor(2)
        self._under_way: dict[int, Future[bytes]] = {}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.info.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        block, start = divmod(self._at, _BLOCK)
        if self._at >= self.info.size:
            return 0
        data = self._block(block)[start : start + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _block(self, number: int) -> bytes:
        wanted = [n for n in (number, number + 1) if n * _BLOCK < self.info.size]
        self._under_way = {
            n: self._under_way.get(n) or self._pool.submit(self._get, n) for n in wanted
        }
        return self._under_way[number].result()

    def _get(self, number: int) -> bytes:
        offset = number * _BLOCK
        length = min(_BLOCK, self.info.size - offset)
        return self._store.get(self._key, offset, length, etag=self.info.etag)
