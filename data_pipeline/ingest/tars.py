"""Reads untrusted tar files with bounded headers.

A header of a few bytes may claim a name of gigabytes, a sparse map with a billion holes or a member
beyond any file size, and a compressed tar of megabytes may really contain them. `tarfile` trusts
these claims and raises arbitrary exceptions. This module bounds the bytes of every header and
raises `tarfile.ReadError` for every invalid one. It never extracts to disk and follows no links.
"""

import io
import tarfile
from collections.abc import Iterator
from typing import IO, Any, cast

# Limit of one member's header: blocks, long names, PAX records, the map of a sparse file.
_HEADER_BYTES = 1 << 20
# Limit of a name: Linux's PATH_MAX. Regular expressions would be slow on longer names.
_NAME_BYTES = 4096
_ZEROS = bytes(tarfile.BLOCKSIZE)


Members = Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]


def archives(file: IO[bytes]) -> Iterator[Members]:
    """Yield each tar of a file of concatenated tars (as `cat` joins them).

    Args:
        file: read from its current position.

    Returns:
        Per tar, an iterator over its members except folders, each with the open tar for `content`;
        exhaust it before the next tar.

    Raises:
        tarfile.ReadError: a damaged or absurd header, a missing end mark, or data other than a tar
            after the end mark.
    """
    more = True
    while more:
        yield _members(file)
        more = _at_next(file)


def _members(file: IO[bytes]) -> Members:
    bounded, reached = _Bounded(file), file.tell()
    with _opened(bounded) as tar:
        while (info := _next(tar, bounded)) is not None:
            vars(tar)["members"].clear()  # tarfile would keep every header in memory
            if len(info.name) > _NAME_BYTES:
                raise tarfile.ReadError(f"a name of {len(info.name)} characters")
            if info.size < 0 or tar.offset <= reached:  # going back would loop forever
                raise tarfile.ReadError(f"a member of {info.size} bytes")
            reached = tar.offset
            if not info.isdir():
                yield tar, info
        # tarfile treats a damaged header and a truncated file as a regular end.
        bounded.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != _ZEROS:
            raise tarfile.ReadError(f"neither a header nor the end mark at byte {tar.offset}")


def _at_next(file: IO[bytes]) -> bool:
    """Skip the zeros after an end mark; return whether another tar follows.

    Raises:
        tarfile.ReadError: a block starts with a zero but is not all zeros.
    """
    # `peek` avoids seeking back, which would decompress a packed file from its beginning.
    peek = cast("io.BufferedReader", file).peek
    while (first := peek(1)[:1]) == b"\0":
        at = file.tell()
        if (block := file.read(tarfile.BLOCKSIZE)) != _ZEROS[: len(block)]:
            raise tarfile.ReadError(f"neither a tar nor zeros after the end mark, at byte {at}")
    return bool(first)


def content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    """Return the bytes of a member, whose `info.size` the caller has checked."""
    bounded: Any = tar.fileobj
    bounded.left = info.size
    member = tar.extractfile(info)
    assert member is not None
    return member.read()


class _Bounded:
    """A file that reads at most `left` bytes until `left` is raised."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.left = file, _HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.left:
            raise tarfile.ReadError(f"a header that claims {size} bytes or more")
        self.left -= size
        return self._file.read(size)

    def seek(self, offset: int) -> int:
        try:
            return self._file.seek(offset)
        except (OSError, OverflowError, ValueError) as error:
            raise tarfile.ReadError(f"a member that reaches to byte {offset}") from error

    def tell(self) -> int:
        return self._file.tell()


def _opened(bounded: _Bounded) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=cast("IO[bytes]", bounded), mode="r:")
    except _ABSURD as error:
        raise tarfile.ReadError(f"an absurd header: {error!r:.100}") from error


def _next(tar: tarfile.TarFile, bounded: _Bounded) -> tarfile.TarInfo | None:
    bounded.left = _HEADER_BYTES
    try:
        return tar.next()
    except _ABSURD as error:
        raise tarfile.ReadError(f"an absurd header: {error!r:.100}") from error


# Exceptions of tarfile for malformed numbers, endless sparse maps and nested headers.
_ABSURD = (ValueError, OverflowError, IndexError, TypeError, RecursionError)
