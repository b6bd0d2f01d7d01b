"""Cache tier: block files in one folder, with checksums and a size limit, shared by processes.

A block file is a header (format, object, block number, length, XXH3-64 of the payload) and the
payload. It is written under a temporary name and renamed, so no reader sees half a block. Files are
not synced to disk. After a power cut a block may be short or wrong; then its checksum fails and the
block is fetched again.

The size limit holds over all processes. Before a write, a process adds its size to the number in
the file `ledger`, under its lock. If the sum exceeds the limit, least recently used blocks are
evicted until a tenth of the limit is free, so the folder is scanned once per tenth of the limit
written. If a crash left the number too high, the next scan corrects it. Removing a file that other
processes read is safe, because they hold it open.

The folder and its files must belong to this user (`data_pipeline.store.private`), because a
checksum does not show who wrote a block.

A tier never raises an error to its user. Failures are counted and logged once, and writes pause for
a while; existing blocks are still read.
"""

import errno
import fcntl
import logging
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from data_pipeline.cache.node import CacheTimeout, locked_file, try_flock
from data_pipeline.store.private import check_private, private_folder

log = logging.getLogger("data_pipeline.cache.cached_store")

# format, object, block number, length of the payload, checksum; 64 bytes in total
_HEADER = struct.Struct("<8s16sQQQ16x")
_FORMAT = b"KPBLOCK1"
_LEDGER = struct.Struct("<Q")
# Files with other names are never touched, because a user may name a folder with other content.
_BLOCK_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.block")
_PART_PREFIX = ".part-"
_PAUSE_S = 60.0
_VERIFY_PIECE = 256 << 10
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# These errors do not concern the block itself, so it is kept.
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class BlockId(NamedTuple):
    """Identity of a block: 16-byte hash of the object's version, block number, payload length."""

    object: bytes
    number: int
    length: int

    @property
    def name(self) -> str:
        """File name of the block."""
        return f"{self.object.hex()}-{self.number:08x}.block"


class OpenBlock:
    """A verified block, open in this process; it stays readable after its file is removed.

    Reads use `pread` instead of a memory map, where a disk error would kill the process. From
    shared memory, a 40 kB read takes 26 us either way.

    Attributes:
        tier: name of the block's tier.
        length: payload length in bytes.
        used: set by readers, cleared by `look_after`.
    """

    __slots__ = ("_handle", "_path", "length", "tier", "used")

    def __init__(self, tier: str, path: str, length: int, handle: int) -> None:
        self.tier, self._path, self.length, self.used = tier, path, length, True
        self._handle = os.dup(handle)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._handle)

    def read(self, start: int, stop: int) -> bytes:
        """Return a copy of payload[start:stop], where 0 <= start <= stop <= length.

        Raises:
            OSError: the file is no longer readable, or was truncated.
        """
        data = os.pread(self._handle, stop - start, start + _HEADER.size)
        if len(data) != stop - start:
            raise OSError(errno.EIO, "block file lost bytes", self._path)
        return data

    def look_after(self) -> bool:
        """Update the file's time of use for eviction; return False if the file is gone."""
        used, self.used = self.used, False
        try:
            if used:
                os.utime(self._path)
            return used or os.path.exists(self._path)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the file is readable, but its times cannot be changed


class Tier:
    """Block files in one folder.

    Args:
        name: "memory" for a folder in shared memory, or "disk".
        folder: the folder, created if missing; in a shared folder (mode 1777), a subfolder of this
            user is used.
        limit: maximum size of all block files in bytes, including headers.
        wait_s: seconds to wait for other processes that hold the ledger.

    Attributes:
        evicted, corrupt, failures: this process's counts of blocks removed for space, of blocks
            dropped because of wrong bytes, and of failed file operations.
    """

    def __init__(self, name: str, folder: Path, limit: int, wait_s: float) -> None:
        self.name, self.folder = name, folder
        self._limit, self._wait_s = limit, wait_s
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._said = False
        self.evicted = self.corrupt = self.failures = 0
        try:
            self.folder = private_folder(folder)
        except OSError as error:
            self._pause(error)

    @property
    def writable(self) -> bool:
        """True, except for a while after a failed write."""
        return time.monotonic() >= self._paused_until

    def open(self, block: BlockId) -> OpenBlock | None:
        """Return the block after verifying it; None if it is missing or was dropped as corrupt."""
        path = os.path.join(self.folder, block.name)
        try:
            handle = os.open(path, _READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._trouble(error)
            return None
        try:
            if not _sound(handle, block):
                with self._lock:
                    self.corrupt += 1
                self.drop(block)
                return None
            with suppress(OSError):
                os.utime(handle)  # time of last use, for eviction
            return OpenBlock(self.name, path, block.length, handle)
        except OSError as error:
            self._trouble(error)
            if error.errno not in _SHORTAGE:
                self.drop(block)
            return None
        finally:
            os.close(handle)

    def put(self, block: BlockId, payload: memoryview) -> bool:
        """Write the block unless it exists; return whether it exists now."""
        if not self.writable:
            return False
        try:
            with self._ledger() as ledger:
                path = os.path.join(self.folder, block.name)
                if os.path.exists(path):
                    return True
                part = self._reserve(ledger, _HEADER.size + block.length)
            if part is None:
                return False
            self._write(*part, path, block, payload)
        except (OSError, CacheTimeout) as error:
            self._pause(error)
            return False
        return True

    def drop(self, block: BlockId) -> None:
        """Remove the block if it exists. The next scan updates the ledger."""
        try:
            os.unlink(os.path.join(self.folder, block.name))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._trouble(error)

    def sweep(self) -> None:
        """Remove files of dead writers, correct the ledger and evict down to the limit."""
        try:
            with self._ledger() as ledger:
                _write_number(ledger, self._evict(self._limit))
        except (OSError, CacheTimeout) as error:
            self._pause(error)

    @contextmanager
    def _ledger(self) -> Iterator[int]:
        check_private(self.folder)  # each time, because rights or the folder may have changed
        with locked_file(self.folder / "ledger", self._wait_s) as handle:
            yield handle

    def _reserve(self, ledger: int, size: int) -> tuple[int, str] | None:
        """Reserve `size` bytes and make a temporary file for them; return None if there is no room.

        The writer locks the file and sets its final length at once, so that a scan counts it in
        full and recognises files of dead writers. The caller must hold the ledger's lock.
        """
        number = os.pread(ledger, _LEDGER.size, 0)
        used = _LEDGER.unpack(number)[0] if len(number) == _LEDGER.size else self._limit
        if used + size > self._limit:
            used = self._evict(self._limit * 9 // 10 - size)
            if used + size > self._limit:
                _write_number(ledger, used)
                return None  # other processes are writing that much now
        handle, temporary = tempfile.mkstemp(prefix=_PART_PREFIX, dir=self.folder)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.truncate(handle, size)
            _write_number(ledger, used + size)
        except BaseException:
            _abandon(handle, temporary)
            raise
        return handle, temporary

    def _write(
        self, handle: int, temporary: str, path: str, block: BlockId, payload: memoryview
    ) -> None:
        """Fill the temporary file, rename it to its final name and close it."""
        try:
            head = _HEADER.pack(_FORMAT, *block, xxh3_64_intdigest(payload))
            for offset, data in ((0, memoryview(head)), (len(head), payload)):
                done = 0
                while done < len(data):  # a nearly full disk may accept only a part
                    done += os.pwrite(handle, data[done:], offset + done)
            with self._ledger():  # a scan must see the file under one of its two names
                os.rename(temporary, path)
        except BaseException:
            _abandon(handle, temporary)
            raise
        os.close(handle)

    def _evict(self, target: int) -> int:
        """Evict least recently used blocks down to `target` bytes; return the remaining bytes."""
        used, found = 0, list[tuple[int, str, int]]()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                block = _BLOCK_NAME.fullmatch(entry.name) is not None
                if not block and not entry.name.startswith(_PART_PREFIX):
                    continue
                if not block and _remove_dead(entry.path):
                    continue
                with suppress(FileNotFoundError):  # another process renamed or dropped it
                    status = entry.stat(follow_symlinks=False)
                    used += status.st_size
                    if block:
                        found.append((status.st_mtime_ns, entry.path, status.st_size))
        for _, path, size in sorted(found):
            if used <= target:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
                with self._lock:
                    self.evicted += 1
            used -= size
        return used

    def _pause(self, error: Exception) -> None:
        """Pause writes for a while; on a full disk, also evict blocks so that later writes fit."""
        self._trouble(error)
        self._paused_until = time.monotonic() + _PAUSE_S
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError, CacheTimeout), self._ledger() as ledger:
                used = self._evict(self._limit)
                _write_number(ledger, self._evict(used * 7 // 8))

    def _trouble(self, error: Exception) -> None:
        with self._lock:
            self.failures += 1
            said, self._said = self._said, True
        if not said:
            log.warning(
                "the %s tier of the cache at %s failed: %s; going on without it, and trying to "
                "write to it again every %g s. Make room, correct its rights or lower its size. "
                "This is said once.",
                *(self.name, self.folder, error, _PAUSE_S),
            )


def _sound(handle: int, block: BlockId) -> bool:
    """Return whether the file holds exactly this block and belongs to this user."""
    status = os.fstat(handle)
    if status.st_uid != os.getuid() or status.st_size != _HEADER.size + block.length:
        return False
    head = os.pread(handle, _HEADER.size, 0)
    if len(head) != _HEADER.size:
        return False
    *identity, checksum = _HEADER.unpack(head)
    if identity != [_FORMAT, *block]:
        return False
    digest, buffer = xxh3_64(), memoryview(bytearray(min(_VERIFY_PIECE, block.length)))
    done = 0
    while done < block.length:
        piece = buffer[: block.length - done]
        got = os.preadv(handle, [piece], _HEADER.size + done)
        if not got:
            return False
        digest.update(piece[:got])
        done += got
    return digest.intdigest() == checksum


def _abandon(handle: int, temporary: str) -> None:
    os.close(handle)
    with suppress(OSError):
        os.unlink(temporary)


def _write_number(ledger: int, used: int) -> None:
    os.pwrite(ledger, _LEDGER.pack(used), 0)


def _remove_dead(part: str) -> bool:
    """Remove a temporary file if its writer is dead; return whether the file is gone.

    Call it under the ledger's lock, which writers hold while they lock or rename a file.
    """
    try:
        handle = os.open(part, _READ)
    except FileNotFoundError:
        return True
    try:
        if not try_flock(handle, fcntl.LOCK_EX):
            return False
        os.unlink(part)
        return True
    except FileNotFoundError:
        return True
    finally:
        os.close(handle)
