"""Writes the files of a run folder; a disk that is full for a while does not end the training.

Records that cannot be appended are logged once and kept in memory for the next attempt, in order
and without a gap.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_pipeline.store.patient import patiently

log = logging.getLogger("kimi_pretrain.reliability.run_files")

# Unwritten bytes of one file that are kept; later records are counted and left out.
KEPT_BYTES = 64 << 20
# For so long a file is read again whose disk or file server is away.
PATIENCE_S = 60.0
FULL = (errno.ENOSPC, errno.EDQUOT)


class Appended:
    """A file to which records are appended at once; disk errors are logged, never raised."""

    def __init__(self, file: Path):
        self.file = file
        self._fd: int | None = None
        self._left = b""  # unwritten; may begin inside of a record
        self._left_out = 0

    def write(self, record: bytes) -> None:
        """Append a record, and before it those that could not be written so far."""
        failing = bool(self._left)
        self._left += record
        try:
            self._write()
        except OSError as error:
            self._forget_fd()  # of a file server that was replaced it never works again
            if len(self._left) > KEPT_BYTES and len(self._left) >= len(record):
                self._left = self._left[: len(self._left) - len(record)]
                self._left_out += 1
            if not failing:
                log.warning(
                    "%s: %s; training goes on, and what could not be written is kept for later",
                    self.file, error.strerror,
                )  # fmt: skip
            return
        if failing:
            gone = f"; {self._left_out} records are lost" if self._left_out else ""
            log.warning("%s: written again%s", self.file, gone)
            self._left_out = 0

    def close(self) -> None:
        """Try once more to write what is left, then close."""
        if self._left:
            self.write(b"")
        if self._left:
            lost = len(self._left)
            log.warning("%s: the last %d bytes could not be written", self.file, lost)
        self._forget_fd()

    def _write(self) -> None:
        if self._fd is None:
            self._fd = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        while self._left:
            self._left = self._left[os.write(self._fd, self._left) :]

    def _forget_fd(self) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = None


def write_whole(file: Path, content: str | bytes, *, in_place: bool = False) -> None:
    """Write a file so that a reader, also after a loss of power, sees the old or the new one.

    Args:
        in_place: where the disk is full, write over the old file, which takes no room. For content
            of less than a block, of which readers see no part.

    Raises:
        OSError: it cannot be written; names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = file.with_name(f"{file.name}.partial")
    try:
        with partial.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        if not (in_place and error.errno in FULL and file.is_file()):
            raise OSError(error.errno, error.strerror, str(file)) from None
        with naming(file):
            _write_over(file, data)


def read_patiently(file: Path) -> bytes | None:
    """Return what a file holds, None if there is none; again while its file system is away.

    Raises:
        OSError: it cannot be read; names the file.
    """
    try:
        return patiently(file.read_bytes, str(file), PATIENCE_S)
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextmanager
def best_effort() -> Iterator[None]:
    """Log an error of writing a file instead of raising it."""
    try:
        yield
    except OSError as error:
        log.warning("%s: %s; the run goes on without it", error.filename, error.strerror)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the file's name to an OSError; that of a `write` lacks it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def _write_over(file: Path, data: bytes) -> None:
    fd = os.open(file, os.O_WRONLY)
    try:
        size = os.fstat(fd).st_size
        os.pwrite(fd, data.ljust(size), 0)  # JSON ends where it ends: blanks may follow
        os.fsync(fd)
    finally:
        os.close(fd)
