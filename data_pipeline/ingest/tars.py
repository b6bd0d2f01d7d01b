"""Untrusted tar files, read with bounded headers, whatever sizes these claim.

A header of a few bytes may claim a name of gigabytes, a map of a billion holes or a member that
reaches beyond any file; packed, a tar of megabytes may really hold all that. `tarfile` believes it
and raises whatever comes of it. Here every header has a few bytes at most, and what makes no sense
is one `tarfile.ReadError`. Nothing is ever unpacked to a disk, and no link is followed.
"""

import io
import tarfile
from collections.abc import Iterator
from typing import IO, Any, cast

# Of one member: header blocks, long names, PAX records, the map of a sparse file.
_HEADER_BYTES = 1 << 20
# Of a name: Linux's PATH_MAX. Longer ones would also make searching in them slow.
_NAME_BYTES = 4096
_ZEROS = bytes(tarfile.BLOCKSIZE)


Members = Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]


def archives(file: IO[bytes]) -> Iterator[Members]:
    """Yield each of the tars that stand one after the other in a file, as `cat` joins them.

    Args:
        file: reading begins where it stands.

    Returns:
        An iterator over the members of each tar but folders, with the open tar for `content`; read
        it to its end before the next.

    Raises:
        tarfile.ReadError: a damaged or absurd header, no mark at the end, or something else than a
            tar after the mark.
    """
    more = True
    while more:
        yield _members(file)
        more = _at_next(file)


def _members(file: IO[bytes]) -> Members:
    bounded, reached = _Bounded(file), file.tell()
    with _opened(bounded) as tar:
        while (info := _next(tar, bounded)) is not None:
            vars(tar)["members"].clear()  # it would keep every header
            if len(info.name) > _NAME_BYTES:
                raise tarfile.ReadError(f"a name of {len(info.name)} characters")
            if info.size < 0 or tar.offset <= reached:  # it would lead back, for ever
                raise tarfile.ReadError(f"a member of {info.size} bytes")
            reached = tar.offset
            if not info.isdir():
                yield tar, info
        # tarfile takes a damaged header, and the end of a file that breaks off, for the end.
        bounded.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != _ZEROS:
            raise tarfile.ReadError(f"neither a header nor the end mark at byte {tar.offset}")


def _at_next(file: IO[bytes]) -> bool:
    """Pass over the zeros after an end mark; returns whether another tar begins there.

    Raises:
        tarfile.ReadError: something else begins there.
    """
    # `peek` in place of a step back, for which a packed file would be unpacked from its beginning.
    peek = cast("io.BufferedReader", file).peek
    while (first := peek(1)[:1]) == b"\0":
        at = file.tell()
        if (block := file.read(tarfile.BLOCKSIZE)) != _ZEROS[: len(block)]:
            raise tarfile.ReadError(f"neither a tar nor zeros after the end mark, at byte {at}")
    return bool(first)


def content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    """The bytes of a member; the caller has looked at `info.size` before."""
    bounded: Any = tar.fileobj
    bounded.left = info.size
    member = tar.extractfile(info)
    assert member is not None
    return member.read()


class _Bounded:
    """A file that gives no more than `left` bytes until it is allowed more."""

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


# What tarfile raises for numbers that are none, maps without an end, headers of headers.
_ABSURD = (ValueError, OverflowError, IndexError, TypeError, RecursionError)
