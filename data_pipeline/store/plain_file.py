"""Opens files from untrusted folders: regular files only, and without blocking."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class SpecialFile(OSError):
    """A pipe, socket or device where a file is expected."""


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Opening a pipe would wait for its writer, and reading a device may never end.

    Raises:
        SpecialFile: the path is a pipe, socket or device.
        IsADirectoryError, OSError: as in `open`.
    """
    _refuse_special(path, os.stat(path))
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _refuse_special(path, os.fstat(file.fileno()))  # it may have been replaced since `stat`
    except BaseException:
        file.close()
        raise
    return file


def _refuse_special(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        what = "is a pipe, socket or device, expected a file; it was not read: remove it"
        raise SpecialFile(errno.EINVAL, what, str(path))
