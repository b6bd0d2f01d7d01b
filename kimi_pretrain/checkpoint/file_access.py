"""Reads the files of one checkpoint, with the same interface for folders and object stores."""

import hashlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from data_pipeline.store.plain_file import open_plain
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable, is_transient
from kimi_pretrain.checkpoint.manifest import Fingerprint
from moonvit3d.safetensors_io import (
    SafetensorsError,
    TensorEntry,
    header_length,
    parse_header,
    parse_metadata,
)

if TYPE_CHECKING:
    from data_pipeline.store.open import Store

_PIECE = 8 << 20
_AHEAD = 4  # concurrent reads of pieces

# Callback with the number of bytes just read or written.
OnBytes = Callable[[int], None]


class CheckpointUnreadable(CheckpointError):
    """This user has no permission to read a file; a user error, no sign of damage."""


class Files(Protocol):
    """Reader of a checkpoint's files by their plain names; thread-safe.

    All methods raise `CheckpointUnavailable` if a retry may succeed, `CheckpointUnreadable` if this
    user may not read a file of a folder, and the errors of `Store.get` if a store refuses. Any
    other `CheckpointError` means damage.
    """

    uri: str

    def where(self, name: str) -> str:
        """Return the full name of a file, for messages."""
        return f"{self.uri}/{name}"

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""
        ...

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`.

        Raises:
            CheckpointError: the file does not exist or is shorter.
        """
        ...

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill `out`, writable bytes, from `offset`; raises like `read`."""
        ...


class FolderFiles(Files):
    """The files of a local or shared folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.uri = folder, str(folder)

    def size(self, name: str) -> int | None:
        """See `Files.size`."""
        try:
            return size_of(self.folder / name)
        except OSError as error:
            raise _failed(self.where(name), error) from error

    def read(self, name: str, offset: int, length: int) -> bytes:
        """See `Files.read`."""
        data = bytearray(length)
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """See `Files.read_into`."""
        with self._open(name) as file:
            done = 0
            while done < len(out):
                got = os.preadv(file.fileno(), [out[done : done + (1 << 30)]], offset + done)
                if not got:
                    raise CheckpointError(
                        f"{self.where(name)}: expected {len(out)} bytes from byte {offset}, the "
                        f"file ends after {done} of them; it was cut off, take another checkpoint"
                    )
                done += got

    @contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        try:
            with open_plain(self.folder / name) as file:
                yield file
        except (FileNotFoundError, NotADirectoryError):
            raise _missing(self.where(name)) from None
        except OSError as error:  # includes errors of a failing disk during a read
            raise _failed(self.where(name), error) from error


class StoreFiles(Files):
    """The files under a prefix of an object store."""

    def __init__(self, store: "Store", prefix: str) -> None:
        self._store, self._prefix = store, prefix.strip("/")
        self.uri = f"{store.uri}/{self._prefix}".rstrip("/")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def size(self, name: str) -> int | None:
        """See `Files.size`."""
        from data_pipeline.store.open import MissingKey

        try:
            with _answering():
                return self._store.head(self._key(name)).size
        except MissingKey:
            return None

    def read(self, name: str, offset: int, length: int) -> bytes:
        """See `Files.read`."""
        from data_pipeline.store.open import MissingKey

        try:
            with _answering():
                return self._store.get(self._key(name), offset, length)
        except MissingKey:
            raise _missing(self.where(name)) from None

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """See `Files.read_into`."""
        done = 0
        for piece in read_ahead(partial(self.read, name), offset, len(out)):
            out[done : done + len(piece)] = piece
            done += len(piece)


def read_ahead(read: Callable[[int, int], bytes], offset: int, length: int) -> Iterator[bytes]:
    """Yield `read(offset, length)` in pieces, while threads read a few pieces ahead.

    The threads end with the last piece, or when the caller stops.
    """
    spans = [(offset + begin, min(_PIECE, length - begin)) for begin in range(0, length, _PIECE)]
    if len(spans) <= 1:
        yield from (read(*span) for span in spans)
        return
    with ThreadPoolExecutor(_AHEAD) as pool:
        waiting: deque[Future[bytes]] = deque()
        try:
            for span in spans:
                waiting.append(pool.submit(read, *span))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def fingerprint(files: Files, name: str, progress: OnBytes | None = None) -> Fingerprint:
    """Return size and SHA-256 of a file; raises like `Files.read`."""
    expected = files.size(name)
    if expected is None:
        raise _missing(files.where(name))
    digest, size = hashlib.sha256(), 0
    for piece in read_ahead(partial(files.read, name), 0, expected):
        digest.update(piece)
        size += len(piece)
        if progress is not None:
            progress(len(piece))
    return Fingerprint(size, digest.hexdigest())


def read_header(files: Files, name: str, size: int | None) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file of `size` bytes (None if it does not exist).

    This reads only the header.

    Raises:
        CheckpointError: it is not a complete safetensors file. Other errors as in `Files.read`.
    """
    with _no_damage():
        text = _header_text(files, name, size)
        return parse_header(text, size or 0, files.where(name))


def read_metadata(files: Files, name: str, size: int | None) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file; see `read_header`."""
    with _no_damage():
        return parse_metadata(_header_text(files, name, size), files.where(name))


def _header_text(files: Files, name: str, size: int | None) -> bytes:
    where = files.where(name)
    if size is None or size < 8:
        raise CheckpointError(f"{where}: {size or 0} bytes are no whole safetensors file")
    return files.read(name, 8, header_length(files.read(name, 0, 8), size, where))


@contextmanager
def _no_damage() -> Iterator[None]:
    try:
        yield
    except SafetensorsError as error:
        raise CheckpointError(f"{error}; take another checkpoint") from None


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes, or None if the path does not exist or is not a file.

    `Path.is_file` would report some errors of a shared folder as a missing file.

    Raises:
        OSError: the file system cannot determine this.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


@contextmanager
def _answering() -> Iterator[None]:
    """Raise `CheckpointUnavailable` if a store does not respond; refusals pass unchanged."""
    from data_pipeline.store.open import StoreUnavailable

    try:
        yield
    except StoreUnavailable as error:  # names the object
        raise CheckpointUnavailable(str(error)) from error


def _failed(where: str, error: OSError) -> CheckpointError:
    kind = CheckpointUnavailable if is_transient(error) else CheckpointUnreadable
    return kind(f"{where}: {error.strerror or error}")


def _missing(where: str) -> CheckpointError:
    return CheckpointError(f"{where}: missing; restore the file or take another checkpoint")
