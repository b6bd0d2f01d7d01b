"""Byte ranges of raw inputs: in a local file, an object in a store, or a tar in either."""

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

# Errors caused by the path in the input, which reject the sample. All other errors come from the
# machine or from missing permissions; they end the ingest.
INPUT_ERRNOS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO, errno.ENODEV, errno.EOVERFLOW),
}
# Objects are streamed in requests of this size, and the next block is prefetched.
_BLOCK = 8 << 20
# Maximum bytes of one sample held in memory if its files cannot be read again later: a compressed
# tar of a few megabytes may expand to any size.
MAX_LOADED = 1 << 30


def in_store(where: str) -> bool:
    """Return whether `where` is the URI of an object, not a path."""
    return "://" in where and not where.startswith("file://")


def points_outside(path: str, folder: str) -> bool:
    """Return whether a local path, after resolving links, exists outside `folder`."""
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([real, root]) != root and os.path.exists(real)


def open_regular(path: str) -> io.BufferedReader:
    """Open a file for reading; raise OSError for a pipe or device, which may block forever."""
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
    """Return the store of a bucket, opened once per process, and the key inside it."""
    root, key = _parted(uri)
    return _store(root), key


def _parted(uri: str) -> tuple[str, str]:
    """Return the bucket's URI and the key."""
    scheme, rest = uri.split("://", 1)
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


@dataclass(frozen=True)
class ByteSource:
    """A byte range of a path or URI, to be read later by any process; to the end if length is None.

    `data` holds the bytes if they had to be read already.
    """

    where: str
    offset: int = 0
    length: int | None = None
    data: bytes | None = None

    @property
    def size(self) -> int:
        """Number of bytes; an estimate if the exact size would take a request."""
        if self.data is not None:
            return len(self.data)
        return 1 << 18 if self.length is None else self.length

    def read(self, most: int) -> bytes:
        """Read the bytes.

        A sample is refused only for its own error: it names a missing or too large file. Errors of
        the store, of permissions or of the machine end the ingest.

        Raises:
            Refused: there is no such file or object, or it has more than `most` bytes.
            StoreError, OSError: it cannot be read, for a reason outside the sample.
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
        except ValueError as error:  # not a valid path
            raise Refused("missing file", f"{self.where!r}: {error}") from None

    def _from_store(self, most: int) -> bytes:
        """Read an object; a HEAD request gets the size first if it is unknown."""
        try:
            root, key = _parted(self.where)
            split_place("a file", root)
            check_key(key)
        except ValueError as error:  # not a valid URI
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
    """A tar member that is not read: a link, or a member too large to be unpacked."""

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
        FileNotFoundError, MissingKey: the path or object does not exist.
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
    """An object as a file; all reads are of the same version."""

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
