"""Bytes of crude data where they lie: in a local file, in a store, or inside a tar of either."""

import gzip
import io
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, cast

from data_pipeline.ingest.samples import Refused
from data_pipeline.store.open import MissingKey, Store, open_store

# Objects are streamed in requests of this size, the next one under way while one is read.
_BLOCK = 8 << 20
# Of one sample, where its files cannot be read later one by one: a packed tar of a few megabytes
# may hold any number of zeros.
MOST_HELD = 1 << 30


def in_store(where: str) -> bool:
    """Whether `where` is the URI of an object, and not a path."""
    return "://" in where and not where.startswith("file://")


def leads_out(path: str, folder: str) -> bool:
    """Whether a local path, all links followed, is something outside of `folder`."""
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([real, root]) != root and os.path.exists(real)


@cache
def _store(root: str) -> Store:
    return open_store(root)


def store_of(uri: str) -> tuple[Store, str]:
    """The store of a bucket, opened once per process, and the key inside it."""
    scheme, rest = uri.split("://", 1)
    bucket, _, key = rest.partition("/")
    return _store(f"{scheme}://{bucket}"), key


@dataclass(frozen=True)
class Blob:
    """Bytes that are still to be read, by any process.

    Attributes:
        where: path, or URI of an object.
        offset, length: which bytes of it; None: all that follow.
        held: the bytes themselves, where they had to be read already.
    """

    where: str
    offset: int = 0
    length: int | None = None
    held: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes, or a guess where that would take a request."""
        if self.held is not None:
            return len(self.held)
        return 1 << 18 if self.length is None else self.length

    def read(self, most: int) -> bytes:
        """The bytes.

        Raises:
            Refused: there is no such file or object, or it has more than `most` bytes.
        """
        if self.held is not None:
            return self.held
        if self.length is not None and self.length > most:
            raise self._too_large(self.length, most)
        if in_store(self.where):
            try:
                store, key = store_of(self.where)
                return store.get(key, self.offset, self.length)
            except (MissingKey, ValueError) as error:  # ValueError: no possible URI
                raise Refused("missing file", str(error)) from None
        try:
            with open(self.where, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if self.length is None and size > most:
                    raise self._too_large(size, most)
                file.seek(self.offset)
                return file.read() if self.length is None else file.read(self.length)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
            raise Refused("missing file", f"{self.where}: {error.strerror}") from None

    def _too_large(self, size: int, most: int) -> Refused:
        return Refused("too large", f"{self.where}: {size} bytes, at most {most}")


class Withheld(Blob):
    """Bytes that would have had to be held since they came by, and are too many for that."""

    def read(self, most: int) -> bytes:
        """See `Blob.read`."""
        raise self._too_large(self.length or 0, MOST_HELD)


@dataclass(frozen=True)
class Opened:
    """A file to be read in order or from any place, and JSON that tells its version."""

    file: IO[bytes]
    version: dict[str, Any]


@contextmanager
def opened(where: str) -> Iterator[Opened]:
    """Open a path or an object for reading; what ends in ".gz" or ".tgz" is unpacked.

    Raises:
        FileNotFoundError, MissingKey: as named.
    """
    with io.BufferedReader(_Blocks(where)) if in_store(where) else open(where, "rb") as file:
        if isinstance(file.raw, _Blocks):
            version = {"size": file.raw.info.size, "etag": file.raw.info.etag}
        else:
            status = os.fstat(file.fileno())
            version = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
        if where.endswith((".gz", ".tgz")):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield Opened(cast("IO[bytes]", unpacked), version)
        else:
            yield Opened(file, version)


class _Blocks(io.RawIOBase):
    """An object as a file, of one version throughout."""

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
