"""Writes the files of a run folder; a temporarily full disk does not end the training.

Records that cannot be appended are logged once and kept in memory until the next attempt, in order
and without gaps.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_pipeline.store.patient import patiently

log = logging.getLogger("kimi_pretrain.reliability.run_files")

# Limit of unwritten bytes kept per file; later records are counted and dropped.
KEPT_BYTES = 64 << 20
# Time during which reads are retried while the disk or file server is unavailable.
PATIENCE_S = 60.0
FULL = (errno.ENOSPC, errno.EDQUOT)


class Appended:
    """A file that gets each record appended immediately; disk errors are logged, never raised."""

    def __init__(self, file: Path):
        self.file = file
        self._fd: int | None = None
        self._left = b""  # unwritten bytes; may start in the middle of a record
        self._left_out = 0

    def write(self, record: bytes) -> None:
        """Append a record, after all records that could not be written so far."""
        failing = bool(self._left)
        self._left += record
        try:
            self._write()
        except OSError as error:
            self._forget_fd()  # useless after a file server was replaced
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
        """Try once more to write the remaining records, then close the file."""
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
    """Write a file atomically: a reader sees the old or the new content, even after a power loss.

    Args:
        in_place: overwrite the old file if the disk is full, which needs no space. Use it for
            content smaller than a block, which readers never see in part.

    Raises:
        OSError: the file cannot be written; names the file.
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
    """Return the content of a file, or None if it is missing; retry while its disk is unavailable.

    Raises:
        OSError: the file cannot be read; names the file.
    """
    try:
        return patiently(file.read_bytes, str(file), PATIENCE_S)
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextmanager
def best_effort() -> Iterator[None]:
    """Log an error in writing a file instead of raising it."""
    try:
        yield
    except OSError as error:
        log.warning("%s: %s; the run goes on without it", error.filename, error.strerror)


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the file's name to an OSError; errors of `write` lack it."""
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
        os.pwrite(fd, data.ljust(size), 0)  # trailing blanks are valid after JSON
        os.fsync(fd)
    finally:
        os.close(fd)
