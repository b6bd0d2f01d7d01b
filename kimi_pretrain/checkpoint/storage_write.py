"""Writes, commits and removes checkpoints in a folder or an object store.

The writer process of each rank and several tools use this module; it does not import torch.

In a folder, the files of a save are in `step_x.partial`; rank 0's commit writes manifest.json,
makes everything durable and renames the folder. An object store has no rename, so writing
manifest.json is the commit. If a step is written again, the earlier manifest is deleted first.

A removed checkpoint stops being one before its first file is deleted: a folder is renamed, and in
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

# Marks of a checkpoint that was abandoned because its run resumed from an earlier one: the name of
# the manifest in an object store and in folders of earlier versions, else the name of the folder.
ABANDONED = "manifest.abandoned.json"
_ABANDONED = ".abandoned_"  # followed by a number
_MARKS = "manifest."  # common prefix of MANIFEST and ABANDONED
_PARTIAL, _LEAVING = ".partial", ".leaving"
_DELETES = 16  # concurrent deletions in an object store
_SEEN_S = 30.0  # maximum seconds until a shared file system shows another node's file


class ProtectedSteps:
    """The steps that jobs of this run write or remove, which a clean-up must not touch.

    The clean-up checks here before it removes files of a step. The class is thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._protected: set[int] = set()
        self._removing: int | None = None

    def protect(self, step: int) -> None:
        """Protect a step from now on, after waiting for a removal of it in progress."""
        with self._changed:
            self._protected.add(step)
            self._changed.wait_for(lambda: self._removing != step)

    def is_protected(self, step: int) -> bool:
        """Return whether a step is protected."""
        with self._changed:
            return step in self._protected

    @contextmanager
    def removing(self, step: int) -> Iterator[bool]:
        """Yield whether a step may be removed; if so, `protect` waits for the end of the block.

        Only one thread may remove steps.
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
    """Writer of checkpoints to one location; several threads may write files of a step."""

    def open_step(self, step: int) -> None:
        """Prepare to write files of a step; every process that writes some must call it first."""
        ...

    def write(self, step: int, name: str, source: StagedFile, on_bytes: OnBytes) -> Fingerprint:
        """Write a file and make it durable.

        Raises:
            CheckpointError: the write failed; the message names the file and the reason
                (CheckpointUnavailable if a retry may succeed).
        """
        ...

    def commit(self, step: int, manifest: str, files: Iterable[str]) -> str:
        """Complete a step whose `files` are all written; return its URI. Raises like `write`."""
        ...

    def remove(self, step: int) -> None:
        """Remove a complete checkpoint."""
        ...

    def remove_torn(self, step: int) -> None:
        """Remove the files of a step that a failed save has left."""
        ...

    def abandon(self, step: int) -> str:
        """Mark a complete checkpoint as abandoned; return a message that says where it is kept."""
        ...

    def tidy(self, steps: ProtectedSteps) -> None:
        """Remove the leftovers of killed runs, except those of protected steps."""
        ...


def open_storage_writer(place: Place) -> StorageWriter:
    """Return the writer of a location."""
    if place.folder is not None:
        return FolderWriter(place, place.folder)
    return StoreWriter(place)


class FolderWriter:
    """Writer to a local folder, or a folder that all nodes see."""

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
        """See `StorageWriter.write`; the hash is computed during the write."""
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
                if entry.name not in expected:  # from an earlier attempt with other ranks
                    entry.unlink()
            write_durably(partial / MANIFEST, memoryview(manifest.encode()), lambda _: None)
            sync_folder(partial)
            if (final / ABANDONED).is_file():  # from a version that did not rename the folder
                os.replace(final, self._free_name(step))
            elif final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                os.replace(final, replaced)  # `Place.recover` undoes this if the process is killed
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
        os.replace(self._final(step), leaving)  # from here on it is not a checkpoint
        shutil.rmtree(leaving)

    def remove_torn(self, step: int) -> None:
        """See `StorageWriter.remove_torn`."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def abandon(self, step: int) -> str:
        """See `StorageWriter.abandon`; it stays complete, so that `--resume` can still use it."""
        kept = self._free_name(step)
        os.replace(self._final(step), kept)
        return f"kept as {kept}"

    def _free_name(self, step: int) -> Path:
        """Return the first unused name for an abandoned checkpoint of this step."""
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
                    os.replace(folder, self._final(step))  # the same as `Place.recover`
                elif free:
                    shutil.rmtree(folder, ignore_errors=True)


class StoreWriter:
    """Writer to a prefix of an object store."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def _store(self) -> "Store":
        return self._place.store

    def open_step(self, step: int) -> None:
        """See `StorageWriter.open_step`; this invalidates an earlier checkpoint of this step."""
        with storage_errors(self._store.uri):
            self._store.delete(f"{step_name(step)}/{MANIFEST}")

    def write(self, step: int, name: str, source: StagedFile, on_bytes: OnBytes) -> Fingerprint:
        """See `StorageWriter.write`; large files are uploaded in parts that the server checks."""
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
            for name in sorted(found - expected):  # from an earlier attempt with other ranks
                self._store.delete(f"{prefix}/{name}")
            self._store.put(f"{prefix}/{MANIFEST}", manifest.encode())
        return f"{self._store.uri}/{prefix}"

    def remove(self, step: int) -> None:
        """See `StorageWriter.remove`."""
        self._store.delete(f"{step_name(step)}/{MANIFEST}")
        self.remove_torn(step)

    def remove_torn(self, step: int) -> None:
        """See `StorageWriter.remove_torn`; also removes a commit whose reply was lost."""
        self._store.delete(f"{step_name(step)}/{MANIFEST}")
        keys = [f"{step_name(step)}/{name}" for name in self._names(step)]
        with ThreadPoolExecutor(_DELETES) as pool:  # sequentially, thousands take minutes
            for _ in pool.map(self._store.delete, keys):
                pass

    def abandon(self, step: int) -> str:
        """See `StorageWriter.abandon`; its files stay until the run reaches this step again."""
        prefix = step_name(step)
        self._store.put(f"{prefix}/{ABANDONED}", self._store.get(f"{prefix}/{MANIFEST}"))
        self._store.delete(f"{prefix}/{MANIFEST}")
        return f"its {MANIFEST} is {ABANDONED} now"

    def tidy(self, steps: ProtectedSteps) -> None:
        """See `StorageWriter.tidy`; also removes incomplete uploads, hidden but billed."""
        from data_pipeline.store.open import S3Store

        def is_ours(key: str) -> bool:
            step = step_of(key.partition("/")[0])
            return step is None or steps.is_protected(step)

        if isinstance(self._store, S3Store):
            # Other ranks may be uploading files, but only of steps that are already protected.
            self._store.remove_uploads("step_", but=is_ours)
        for folder in self._place.folders():
            if (step := step_of(folder)) is None or steps.is_protected(step):
                continue
            # Most folders are checkpoints. Their marks are few, but all files may be thousands.
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
    """Mark checkpoints of later steps as abandoned; return a warning for each.

    The run has resumed from an earlier checkpoint, so "latest" must not select these any more.
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
    """Return whether a step's folder only has files of an incomplete checkpoint."""
    found = set(names)
    if found & {MANIFEST, ABANDONED}:
        return False
    return all(name == INDEX or name.endswith(".safetensors") for name in found)
