"""Writes files from memory to disk, bypassing the page cache."""

import errno
import fcntl
import hashlib
import mmap
import os
from pathlib import Path

from kimi_pretrain.checkpoint.file_access import OnBytes

_BLOCK = 16 << 20
_ALIGNED = 4096


class StagedFile:
    """A file in memory (memfd) of `size` bytes, ready to be written; its descriptor stays open."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b""

    @property
    def view(self) -> memoryview:
        """The bytes of the file, aligned to a page."""
        return memoryview(self._map)

    @property
    def path(self) -> str:
        """A path with which this process can open the file."""
        return f"/proc/self/fd/{self.fd}"

    def sha256(self) -> str:
        """Return the SHA-256 of the bytes; hashing releases the GIL."""
        digest, view = hashlib.sha256(), self.view
        for begin in range(0, self.size, _BLOCK):
            digest.update(view[begin : begin + _BLOCK])
        return digest.hexdigest()


def staged_file(data: bytes) -> StagedFile:
    """Return bytes as a file in memory."""
    fd = os.memfd_create("checkpoint")
    done = 0
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])
    return StagedFile(fd, len(data))


def write_durably(path: Path, data: memoryview, on_bytes: OnBytes) -> None:
    """Write a file, bypassing the page cache if possible, and wait until it is on the disk.

    A checkpoint is not read again soon, so in the page cache it would only evict other data, and
    write-back is slower than the disk.

    Args:
        path: path of the file.
        data: bytes to write; aligned to a page if large.
        on_bytes: called with the number of bytes just written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    fd = os.open(path, flags, 0o644)
    try:
        done, whole = 0, len(data) - len(data) % _ALIGNED
        direct = len(data) >= _BLOCK and _set_direct(fd, True)
        while done < len(data):
            if direct and done >= whole:
                direct = _set_direct(fd, False)
            stop = min(done + _BLOCK, whole if direct else len(data))
            try:
                count = os.write(fd, data[done:stop])
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                direct = _set_direct(fd, False)  # the file system has stricter alignment rules
                continue
            done += count
            on_bytes(count)
        os.fsync(fd)
    finally:
        os.close(fd)


def _set_direct(fd: int, direct: bool) -> bool:
    """Set or clear O_DIRECT; return whether it is set now."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError:  # the file system does not support it
        return False
    return direct


def sync_folder(folder: Path) -> None:
    """Wait until the directory entries of a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
