"""Where files of checkpoints are written, committed and removed: a folder, or an object store.

Used by the writer process of each rank and by tools; knows no torch.

In a folder the files of a save lie in `step_x.partial`; rank 0's commit writes manifest.json,
makes everything durable and renames. In an object store nothing can be renamed: manifest.json is
the commit. Whoever writes a step again takes the manifest of the earlier one away first.

What is removed is no checkpoint any more before its first file goes: a folder is renamed, in an
object store the manifest goes first.
"""

import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kimi_pretrain.checkpoint.errors import CheckpointError, kind_of
from kimi_pretrain.checkpoint.manifest import INDEX, MANIFEST, Fingerprint, step_name, step_of
from kimi_pretrain.checkpoint.steps import Steps
from kimi_pretrain.checkpoint.storage_read import REPLACED, Place

if TYPE_CHECKING:
    from data_pipeline.store.open import Store

# What marks a checkpoint that a run has left behind by going on from an earlier one: in an object
# store, and in folders of earlier versions, the manifest's name; in a folder its own.
ABANDONED = "manifest.abandoned.json"
_ABANDONED = ".abandoned_"  # and a number
_MARKS = "manifest."  # as MANIFEST and ABANDONED begin
_PARTIAL, _LEAVING = ".partial", ".leaving"
_BLOCK = 16 << 20
_ALIGNED = 4096
_DELETES = 16  # at a time, in an object store
_SEEN_S = 30.0  # so long may a shared file system take to show another node's file

Written = Callable[[int], None]  # called with the bytes that were just written


class Sink(Protocol):
    """Writes checkpoints under one place. Files of a step may be written from several threads."""

    def open_step(self, step: int) -> None:
        """Make ready for files of a step; every process that writes some calls it first."""
        ...

    def write(self, step: int, name: str, source: "Source", written: Written) -> Fingerprint:
        """Write a file and make it durable.

        Raises:
            CheckpointError: names the file and the reason (CheckpointUnavailable: a later attempt
                may not meet it).
        """
        ...

    def commit(self, step: int, manifest: str, files: Iterable[str]) -> str:
        """Complete a step of which all `files` were written; returns its URI. Raises as `write`."""
        ...

    def remove(self, step: int) -> None:
        """Remove a complete checkpoint."""
        ...

    def remove_torn(self, step: int) -> None:
        """Remove what a save that failed has left of a step."""
        ...

    def abandon(self, step: int) -> str:
        """Take a complete checkpoint out of the run's line; returns what has become of it."""
        ...

    def tidy(self, steps: Steps) -> None:
        """Remove what killed runs have left behind, but of the steps that are spared."""
        ...


class Source:
    """A file in memory (memfd) that is to be written.

    Args:
        fd: its descriptor; it stays open.
        size: bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b""

    @property
    def view(self) -> memoryview:
        """Its bytes, aligned to a page."""
        return memoryview(self._map)

    @property
    def path(self) -> str:
        """A name under which this process can open it."""
        return f"/proc/self/fd/{self.fd}"

    def sha256(self) -> str:
        """Return the hash of its bytes; other threads run meanwhile."""
        digest, view = hashlib.sha256(), self.view
        for begin in range(0, self.size, _BLOCK):
            digest.update(view[begin : begin + _BLOCK])
        return digest.hexdigest()


def source_of(data: bytes) -> Source:
    """Return bytes as a file in memory."""
    fd = os.memfd_create("checkpoint")
    done = 0
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])
    return Source(fd, len(data))


def open_sink(place: Place) -> Sink:
    """Return where the checkpoints of a place are written."""
    if place.folder is not None:
        return FolderSink(place, place.folder)
    return StoreSink(place)


class FolderSink:
    """A local folder, or one that all nodes see."""

    def __init__(self, place: Place, root: Path) -> None:
        self._place, self.root = place, root

    def _final(self, step: int) -> Path:
        return self.root / step_name(step)

    def _partial(self, step: int) -> Path:
        return self.root / f"{step_name(step)}{_PARTIAL}"

    def open_step(self, step: int) -> None:
        """See `Sink.open_step`."""
        try:
            self._partial(step).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _failed(self._partial(step), error) from None

    def write(self, step: int, name: str, source: Source, written: Written) -> Fingerprint:
        """See `Sink.write`; the hash is computed beside the writing."""
        path = self._partial(step) / name
        with ThreadPoolExecutor(1) as beside:
            digest = beside.submit(source.sha256)
            try:
                write_durably(path, source.view, written)
            except OSError as error:
                raise _failed(path, error) from None
            return Fingerprint(source.size, digest.result())

    def commit(self, step: int, manifest: str, files: Iterable[str]) -> str:
        """See `Sink.commit`."""
        partial, final = self._partial(step), self._final(step)
        replaced = self.root / f"{step_name(step)}{REPLACED}"
        expected = set(files)
        try:
            self._wait_until_seen(partial, expected)
            for entry in sorted(partial.iterdir()):
                if entry.name not in expected:  # of an earlier try with other ranks
                    entry.unlink()
            write_durably(partial / MANIFEST, memoryview(manifest.encode()), lambda _: None)
            _sync_folder(partial)
            if (final / ABANDONED).is_file():  # by an earlier version, which left it its name
                os.replace(final, self._free_name(step))
            elif final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                os.replace(final, replaced)  # `Place.recover` puts it back if this is the end
            os.replace(partial, final)
            _sync_folder(self.root)
        except OSError as error:
            raise _failed(final, error) from None
        shutil.rmtree(replaced, ignore_errors=True)
        return str(final)

    def _wait_until_seen(self, partial: Path, files: set[str]) -> None:
        until = time.monotonic() + _SEEN_S
        while missing := [name for name in sorted(files) if not (partial / name).is_file()]:
            if time.monotonic() > until:
                raise CheckpointError(
                    f"{partial}: {len(missing)} files that other ranks have written are not seen "
                    f"here, first {missing[0]}: checkpoint.place must be on a file system that all "
                    "nodes share"
                )
            time.sleep(0.1)

    def remove(self, step: int) -> None:
        """See `Sink.remove`."""
        leaving = self.root / f"{step_name(step)}{_LEAVING}"
        shutil.rmtree(leaving, ignore_errors=True)
        os.replace(self._final(step), leaving)  # it is no checkpoint any more
        shutil.rmtree(leaving)

    def remove_torn(self, step: int) -> None:
        """See `Sink.remove_torn`."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def abandon(self, step: int) -> str:
        """See `Sink.abandon`; whole, so that `--resume` can go back to it."""
        kept = self._free_name(step)
        os.replace(self._final(step), kept)
        return f"kept as {kept}"

    def _free_name(self, step: int) -> Path:
        """Return the first name for an abandoned checkpoint of this step that is not taken."""
        names = (self.root / f"{step_name(step)}{_ABANDONED}{n}" for n in itertools.count(1))
        return next(name for name in names if not name.exists())

    def tidy(self, steps: Steps) -> None:
        """See `Sink.tidy`."""
        for name in self._place.folders():
            folder = self.root / name
            step = step_of(folder.stem)
            if step is None or folder.suffix not in (REPLACED, _LEAVING, _PARTIAL):
                continue
            with steps.removing(step) as free:
                if free and folder.suffix == REPLACED and not self._final(step).exists():
                    os.replace(folder, self._final(step))  # as `Place.recover` does it
                elif free:
                    shutil.rmtree(folder, ignore_errors=True)


class StoreSink:
    """A prefix of an object store."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def _store(self) -> "Store":
        return self._place.store

    def open_step(self, step: int) -> None:
        """See `Sink.open_step`: from here on an earlier checkpoint of this step is none."""
        self._guarded(lambda: self._store.delete(f"{step_name(step)}/{MANIFEST}"))

    def write(self, step: int, name: str, source: Source, written: Written) -> Fingerprint:
        """See `Sink.write`; large files go up in parts, each checked by the server."""
        key = f"{step_name(step)}/{name}"
        with ThreadPoolExecutor(1) as beside:
            digest = beside.submit(source.sha256)
            info = self._guarded(lambda: self._store.put_file(key, source.path, written))
            if info.size != source.size:
                raise CheckpointError(
                    f"{self._store.uri}/{key}: {info.size} bytes arrived of {source.size}"
                )
            return Fingerprint(source.size, digest.result())

    def commit(self, step: int, manifest: str, files: Iterable[str]) -> str:
        """See `Sink.commit`."""
        prefix, expected = step_name(step), set(files)

        def put() -> None:
            found = set(self._names(step))
            if missing := sorted(expected - found):
                raise CheckpointError(
                    f"{self._store.uri}/{prefix}: {len(missing)} files are gone again, first "
                    f"{missing[0]}; does another run save to the same place?"
                )
            for name in sorted(found - expected):  # of an earlier try with other ranks
                self._store.delete(f"{prefix}/{name}")
            self._store.put(f"{prefix}/{MANIFEST}", manifest.encode())

        self._guarded(put)
        return f"{self._store.uri}/{prefix}"

    def remove(self, step: int) -> None:
        """See `Sink.remove`."""
        self._store.delete(f"{step_name(step)}/{MANIFEST}")
        self.remove_torn(step)

    def remove_torn(self, step: int) -> None:
        """See `Sink.remove_torn`; a commit whose answer was lost has put the manifest, too."""
        self._store.delete(f"{step_name(step)}/{MANIFEST}")
        keys = [f"{step_name(step)}/{name}" for name in self._names(step)]
        with ThreadPoolExecutor(_DELETES) as pool:  # one after the other, thousands take minutes
            for _ in pool.map(self._store.delete, keys):
                pass

    def abandon(self, step: int) -> str:
        """See `Sink.abandon`; its files stay until the new course comes to this step."""
        prefix = step_name(step)
        self._store.put(f"{prefix}/{ABANDONED}", self._store.get(f"{prefix}/{MANIFEST}"))
        self._store.delete(f"{prefix}/{MANIFEST}")
        return f"its {MANIFEST} is {ABANDONED} now"

    def tidy(self, steps: Steps) -> None:
        """See `Sink.tidy`; uploads that were never completed cost money and are nowhere listed."""
        from data_pipeline.store.open import S3Store

        def is_ours(key: str) -> bool:
            step = step_of(key.partition("/")[0])
            return step is None or steps.spared(step)

        if isinstance(self._store, S3Store):
            # Other ranks may be uploading files: of steps that were spared before they began.
            self._store.remove_uploads("step_", but=is_ours)
        for folder in self._place.folders():
            if (step := step_of(folder)) is None or steps.spared(step):
                continue
            # Short where it is a checkpoint, as most are; all its files may be thousands.
            marks = self._store.list(f"{folder}/{_MARKS}")
            if {f"{folder}/{MANIFEST}", f"{folder}/{ABANDONED}"} & set(marks):
                continue
            with steps.removing(step) as free:
                if free and _is_torn(self._names(step)):
                    self.remove_torn(step)

    def _names(self, step: int) -> list[str]:
        prefix = f"{step_name(step)}/"
        return [key.removeprefix(prefix) for key in self._store.list(prefix)]

    def _guarded(self, action: Callable):
        from data_pipeline.store.open import StoreError

        try:
            return action()
        except StoreError as error:
            raise kind_of(error)(str(error)) from None


def set_aside_later(place: Place, sink: Sink, step: int) -> list[str]:
    """Take checkpoints of later steps out of the run's line; returns what is to be told of them.

    They are of a course that the run has left by going on from an earlier one: "latest" must not
    go back to them.
    """
    told = []
    for later in (found for found in place.steps() if found > step):
        kept = sink.abandon(later)
        told.append(
            f"checkpoint of step {later} is of an abandoned course of this run: latest will not "
            f"take it ({kept})"
        )
    return told


def write_durably(path: Path, data: memoryview, written: Written) -> None:
    """Write a file past the page cache where it can be, and wait until it is on the disk.

    The bytes of a checkpoint are not read again soon: in the page cache they would push out what
    is, and its write-back is slower than the disk.

    Args:
        path: of the file.
        data: aligned to a page where it is large.
        written: called with the bytes that were just written.
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
                direct = _set_direct(fd, False)  # a file system with rules of its own
                continue
            done += count
            written(count)
        os.fsync(fd)
    finally:
        os.close(fd)


def _set_direct(fd: int, direct: bool) -> bool:
    """Switch writing past the page cache; returns what is the case then."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError:  # a file system without it
        return False
    return direct


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_torn(names: Iterable[str]) -> bool:
    """Whether a step's folder holds files of a checkpoint, and nothing that makes it one."""
    found = set(names)
    if found & {MANIFEST, ABANDONED}:
        return False
    return all(name == INDEX or name.endswith(".safetensors") for name in found)


def _failed(path: Path, error: OSError) -> CheckpointError:
    hint = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "; free some space, or lower checkpoint.keep_last"
    return kind_of(error)(f"{path}: {error.strerror or error}{hint}")
