"""Where files of checkpoints are written, committed and removed: a folder, or an object store.

Used by the writer process of each rank and by tools; does not import torch.

In a folder the files of a save lie in `step_x.partial`; rank 0's commit writes manifest.json,
makes everything durable and renames. In an object store nothing can be renamed: manifest.json is
the commit. Whoever writes a step again takes the manifest of the earlier one away first.

What is removed stops being a checkpoint before its first file is deleted: a folder is renamed, in
an object store the manifest is deleted first.
"""

import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kimi_pretrain.checkpoint.disk_write import OnBytes, StagedFile, sync_folder, write_durably
from kimi_pretrain.checkpoint.errors import CheckpointError, storage_errors
from kimi_pretrain.checkpoint.manifest import INDEX, MANIFEST, Fingerprint, step_name, step_of
from kimi_pretrain.checkpoint.storage_read import REPLACED, Place

if TYPE_CHECKING:
    from data_pipeline.store.open import Store

# What marks a checkpoint that a run has left behind by going on from an earlier one: in an object
# store, and in folders of earlier versions, the manifest's name; in a folder its own.
ABANDONED = "manifest.abandoned.json"
_ABANDONED = ".abandoned_"  # and a number
_MARKS = "manifest."  # as MANIFEST and ABANDONED begin
_PARTIAL, _LEAVING = ".partial", ".leaving"
_DELETES = 16  # at a time, in an object store
_SEEN_S = 30.0  # so long may a shared file system take to show another node's file


class ProtectedSteps:
    """The steps that this run writes or removes itself; they are not tidied up. Thread-safe.

    Whoever tidies up asks here before it removes anything of a step, and never removes one that
    another job has begun with.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._protected: set[int] = set()
        self._removing: int | None = None

    def protect(self, step: int) -> None:
        """Protect a step from now on; waits while something of it is being removed."""
        with self._changed:
            self._protected.add(step)
            self._changed.wait_for(lambda: self._removing != step)

    def is_protected(self, step: int) -> bool:
        """Whether a step is protected."""
        with self._changed:
            return step in self._protected

    @contextmanager
    def removing(self, step: int) -> Iterator[bool]:
        """Yield whether a step may be removed; if so, `protect` waits for the end of the block.

        One thread alone removes.
        """
        with self._changed:
            assert self._removing is None, self._removing
            free = step not in self._protected
            self._removing = step if free else None
        try:
            yield free
        finally:
            with self._changed:
                self._removing = None
                self._changed.notify_all()


class StorageWriter(Protocol):
    """Writes checkpoints under one place. Files of a step may be written from several threads."""

    def open_step(self, step: int) -> None:
        """Prepare for files of a step; called first by every process that writes some."""
        ...

    def write(self, step: int, name: str, source: StagedFile, on_bytes: OnBytes) -> Fingerprint:
        """Write a file and make it durable.

        Raises:
            CheckpointError: names the file and the reason (CheckpointUnavailable: a retry may
                succeed).
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
        """Mark a complete checkpoint as abandoned; returns where it is now, for a message."""
        ...

    def tidy(self, steps: ProtectedSteps) -> None:
        """Remove what killed runs have left behind, except of protected steps."""
        ...


def open_storage_writer(place: Place) -> StorageWriter:
    """Return the writer of a place."""
    if place.folder is not None:
        return FolderWriter(place, place.folder)
    return StoreWriter(place)


class FolderWriter:
    """A local folder, or one that all nodes see."""

    def __init__(self, place: Place, root: Path) -> None:
        self._place, self.root = place, root

    def _final(self, step: int) -> Path:
        return self.root / step_name(step)

    def _partial(self, step: int) -> Path:
        return self.root / f"{step_name(step)}{_PARTIAL}"

    def open_step(self, step: int) -> None:
        """See `StorageWriter.open_step`."""
        with storage_errors(str(self._partial(step))):
            self._partial(step).mkdir(parents=True, exist_ok=True)

    def write(self, step: int, name: str, source: StagedFile, on_bytes: OnBytes) -> Fingerprint:
        """See `StorageWriter.write`; the hash is computed beside the writing."""
        path = self._partial(step) / name
        with ThreadPoolExecutor(1) as beside, storage_errors(str(path)):
            digest = beside.submit(source.sha256)
            write_durably(path, source.view, on_bytes)
            return Fingerprint(source.size, digest.result())

    def commit(self, step: int, manifest: str, files: Iterable[str]) -> str:
        """See `StorageWriter.commit`."""
        partial, final = self._partial(step), self._final(step)
        replaced = self.root / f"{step_name(step)}{REPLACED}"
        expected = set(files)
        with storage_errors(str(final)):
            self._wait_until_seen(partial, expected)
            for entry in sorted(partial.iterdir()):
                if entry.name not in expected:  # of an earlier try with other ranks
                    entry.unlink()
            write_durably(partial / MANIFEST, memoryview(manifest.encode()), lambda _: None)
            sync_folder(partial)
            if (final / ABANDONED).is_file():  # of a version that left the name as it was
                os.replace(final, self._free_name(step))
            elif final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                os.replace(final, replaced)  # `Place.recover` puts it back if this is the end
            os.replace(partial, final)
            sync_folder(self.root)
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
        """See `StorageWriter.remove`."""
        leaving = self.root / f"{step_name(step)}{_LEAVING}"
        shutil.rmtree(leaving, ignore_errors=True)
        os.replace(self._final(step), leaving)  # it is no checkpoint any more
        shutil.rmtree(leaving)

    def remove_torn(self, step: int) -> None:
        """See `StorageWriter.remove_torn`."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def abandon(self, step: int) -> str:
        """See `StorageWriter.abandon`; whole, so that `--resume` can go back to it."""
        kept = self._free_name(step)
        os.replace(self._final(step), kept)
        return f"kept as {kept}"

    def _free_name(self, step: int) -> Path:
        """Return the first name for an abandoned checkpoint of this step that is not taken."""
        names = (self.root / f"{step_name(step)}{_ABANDONED}{n}" for n in itertools.count(1))
        return next(name for name in names if not name.exists())

    def tidy(self, steps: ProtectedSteps) -> None:
        """See `StorageWriter.tidy`."""
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


class StoreWriter:
    """A prefix of an object store."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def _store(self) -> "Store":
        return self._place.store

    def open_step(self, step: int) -> None:
        """See `StorageWriter.open_step`; an earlier checkpoint of this step ceases to be one."""
        with storage_errors(self._store.uri):
            self._store.delete(f"{step_name(step)}/{MANIFEST}")

    def write(self, step: int, name: str, source: StagedFile, on_bytes: OnBytes) -> Fingerprint:
        """See `StorageWriter.write`; large files go up in parts, each checked by the server."""
        key = f"{step_name(step)}/{name}"
        with ThreadPoolExecutor(1) as beside, storage_errors(self._store.uri):
            digest = beside.submit(source.sha256)
            info = self._store.put_file(key, source.path, on_bytes)
            if info.size != source.size:
                raise CheckpointError(
                    f"{self._store.uri}/{key}: {info.size} bytes arrived of {source.size}"
                )
            return Fingerprint(source.size, digest.result())

    def commit(self, step: int, manifest: str, files: Iterable[str]) -> str:
        """See `StorageWriter.commit`."""
        prefix, expected = step_name(step), set(files)
        with storage_errors(self._store.uri):
            found = set(self._names(step))
            if missing := sorted(expected - found):
                raise CheckpointError(
                    f"{self._store.uri}/{prefix}: {len(missing)} files are gone again, first "
                    f"{missing[0]}; does another run save to the same place?"
                )
            for name in sorted(found - expected):  # of an earlier try with other ranks
                self._store.delete(f"{prefix}/{name}")
            self._store.put(f"{prefix}/{MANIFEST}", manifest.encode())
        return f"{self._store.uri}/{prefix}"

    def remove(self, step: int) -> None:
        """See `StorageWriter.remove`."""
        self._store.delete(f"{step_name(step)}/{MANIFEST}")
        self.remove_torn(step)

    def remove_torn(self, step: int) -> None:
        """See `StorageWriter.remove_torn`; also after a commit whose reply was lost."""
        self._store.delete(f"{step_name(step)}/{MANIFEST}")
        keys = [f"{step_name(step)}/{name}" for name in self._names(step)]
        with ThreadPoolExecutor(_DELETES) as pool:  # one after the other, thousands take minutes
            for _ in pool.map(self._store.delete, keys):
                pass

    def abandon(self, step: int) -> str:
        """See `StorageWriter.abandon`; its files stay until the new course comes to this step."""
        prefix = step_name(step)
        self._store.put(f"{prefix}/{ABANDONED}", self._store.get(f"{prefix}/{MANIFEST}"))
        self._store.delete(f"{prefix}/{MANIFEST}")
        return f"its {MANIFEST} is {ABANDONED} now"

    def tidy(self, steps: ProtectedSteps) -> None:
        """See `StorageWriter.tidy`; also uploads never completed: not listed, but paid for."""
        from data_pipeline.store.open import S3Store

        def is_ours(key: str) -> bool:
            step = step_of(key.partition("/")[0])
            return step is None or steps.is_protected(step)

        if isinstance(self._store, S3Store):
            # Other ranks may be uploading files: of steps that were protected before they began.
            self._store.remove_uploads("step_", but=is_ours)
        for folder in self._place.folders():
            if (step := step_of(folder)) is None or steps.is_protected(step):
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


def abandon_later_checkpoints(place: Place, writer: StorageWriter, step: int) -> list[str]:
    """Mark checkpoints of later steps as abandoned; returns a warning for each.

    The run has left them behind by going on from an earlier one: "latest" must not go back to them.
    """
    warnings = []
    for later in (found for found in place.steps() if found > step):
        kept = writer.abandon(later)
        warnings.append(
            f"checkpoint of step {later} is of an abandoned course of this run: latest will not "
            f"take it ({kept})"
        )
    return warnings


def _is_torn(names: Iterable[str]) -> bool:
    """Whether a step's folder holds files of a checkpoint, and nothing that makes it one."""
    found = set(names)
    if found & {MANIFEST, ABANDONED}:
        return False
    return all(name == INDEX or name.endswith(".safetensors") for name in found)
