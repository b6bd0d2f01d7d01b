"""Read access to a checkpoint location (a folder or an object store) and to one checkpoint in it.

`storage_write` writes and removes checkpoints. A checkpoint exists once its manifest.json does;
without it, a step's folder is an incomplete save, which is never read.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.store.addresses import split_place
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable
from kimi_pretrain.checkpoint.file_access import (
    CheckpointUnreadable,
    Files,
    FolderFiles,
    OnBytes,
    StoreFiles,
    fingerprint,
    read_header,
)
from kimi_pretrain.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    MOST_INDEX_BYTES,
    MOST_MANIFEST_BYTES,
    Fingerprint,
    Manifest,
    check_step,
    parse_index,
    parse_manifest,
    step_name,
    step_of,
)
from moonvit3d.safetensors_io import TensorEntry, bytes_of, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from data_pipeline.store.open import Store

log = logging.getLogger("kimi_pretrain.checkpoint")

URI = str | os.PathLike[str]
PATIENCE_S = 120.0

# Suffix of a folder's name while a new checkpoint of the same step replaces it.
REPLACED = ".replaced"
_STEP = "step_"  # prefix of all checkpoint names
_LOOKS = 16  # concurrent checks for manifests


class Checkpoint:
    """One checkpoint folder, treated as untrusted: every name and number in it is checked.

    It is thread-safe.
    """

    def __init__(self, files: Files) -> None:
        self._files, self.uri = files, files.uri
        self._texts: dict[str, bytes] = {}
        self._headers: dict[str, dict[str, TensorEntry]] = {}

    @cached_property
    def _manifest(self) -> Manifest:
        where = self._files.where(MANIFEST)
        manifest = parse_manifest(self._text(MANIFEST, MOST_MANIFEST_BYTES), where)
        check_step(manifest, self.uri.rstrip("/").rpartition("/")[2], where)
        return manifest

    def manifest(self) -> Manifest:
        """Return the manifest.

        Raises:
            CheckpointError: the checkpoint is incomplete, or its manifest is damaged.
        """
        return self._manifest

    def manifest_problems(self) -> list[str]:
        """Return the damage of an existing manifest: one line, or none.

        Raises:
            CheckpointError: the manifest does not exist or cannot be read.
        """
        try:
            self.manifest()
        except (CheckpointUnavailable, CheckpointUnreadable):
            raise
        except CheckpointError as error:
            if self.is_complete():
                return [str(error)]
            raise
        return []

    def warn_if_unhashed(self) -> None:
        """Log a warning if an earlier version wrote the manifest without a hash of its values."""
        if not self.manifest().hashed:
            log.warning(
                "%s: its %s was written without a hash of its own: damage to the step or to the "
                "loader's position would not be noticed", self.uri, MANIFEST,
            )  # fmt: skip

    def manifest_sha256(self) -> str:
        """Return the SHA-256 of the bytes of manifest.json; raises like `manifest`."""
        return hashlib.sha256(self._text(MANIFEST, MOST_MANIFEST_BYTES)).hexdigest()

    @property
    def step(self) -> int:
        """Number of completed steps at the save."""
        return self.manifest().state.step

    @property
    def files(self) -> dict[str, int]:
        """File -> bytes according to the manifest, without the manifest itself."""
        return {name: found.bytes for name, found in self.manifest().files.items()}

    @cached_property
    def _weight_map(self) -> dict[str, str]:
        files = self.manifest().files
        text = self._text(INDEX, MOST_INDEX_BYTES)
        return parse_index(text, self._files.where(INDEX), files)

    def _text(self, name: str, most: int) -> bytes:
        if name in self._texts:
            return self._texts[name]
        size, where = self._files.size(name), self._files.where(name)
        if size is None and name == MANIFEST:
            raise CheckpointError(
                f"{self.uri}: no {MANIFEST}, so there is no checkpoint here, or one that was never "
                "completed; give a folder such as runs/demo/checkpoints/step_00000110"
            )
        if size is None:
            raise CheckpointError(f"{where}: missing; take another checkpoint")
        if size > most:
            raise CheckpointError(f"{where}: {size} bytes, expected at most {most}")
        return self._files.read(name, 0, size)

    def is_complete(self) -> bool:
        """Return whether this rank currently sees a manifest; raises like `Files`."""
        return self._files.size(MANIFEST) is not None

    def texts(self) -> dict[str, bytes]:
        """Return the bytes of manifest and index, which other ranks pass to `know`.

        Raises:
            CheckpointError: one of the two is missing or oversized.
        """
        return {
            MANIFEST: self._text(MANIFEST, MOST_MANIFEST_BYTES),
            INDEX: self._text(INDEX, MOST_INDEX_BYTES),
        }

    def know(self, texts: Mapping[str, bytes]) -> None:
        """Use these texts of manifest and index, which another rank has read."""
        self._texts = dict(texts)

    def weight_map(self) -> dict[str, str]:
        """Return tensor -> file; raises like `manifest`."""
        return self._weight_map

    def entry(self, name: str) -> TensorEntry:
        """Return dtype, shape and position of a tensor.

        Raises:
            CheckpointError: the tensor does not exist, or its file is damaged.
        """
        file = self.weight_map().get(name)
        if file is None:
            raise CheckpointError(f"{self.uri}: no tensor {name!r}")
        entry = self.header(file).get(name)
        if entry is None:
            raise CheckpointError(
                f"{self._files.where(file)}: no tensor {name!r}, where {INDEX} says it is"
            )
        return entry

    def header(self, file: str) -> dict[str, TensorEntry]:
        """Return the tensors of one file; its header is read once."""
        if file not in self._headers:
            self._headers[file] = read_header(self._files, file, self.files[file])
        return self._headers[file]

    def read_into(self, name: str, tensor: "Tensor") -> None:
        """Fill a tensor on any device in place.

        Raises:
            CheckpointError: the tensor does not exist or has another shape or dtype, or the file is
                truncated.
        """
        import torch

        entry = self.entry(name)
        dtype = torch_dtype(entry.dtype)
        if (dtype, entry.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise CheckpointError(
                f"{self.uri}: {name!r} is {dtype} {entry.shape}, expected "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
        with torch.no_grad():
            direct = tensor.device.type == "cpu" and tensor.is_contiguous()
            here = tensor.detach() if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
            if entry.nbytes:
                file = self.weight_map()[name]
                self._files.read_into(file, entry.offset, bytes_of(here))
            if not direct:
                tensor.detach().copy_(here)

    def tensor(self, name: str) -> "Tensor":
        """Return one tensor on the host; raises like `read_into`."""
        import torch

        entry = self.entry(name)
        tensor = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        self.read_into(name, tensor)
        return tensor

    def verify(
        self, files: Iterable[str] | None = None, progress: OnBytes | None = None
    ) -> list[str]:
        """Read files and compare them with the manifest.

        Args:
            files: names of files in the manifest; None for all files.
            progress: called with the number of bytes just read.

        Returns:
            one line for each damaged file: its name, its actual and its expected state.

        Raises:
            CheckpointError: the manifest itself is missing or damaged.
            CheckpointUnavailable, CheckpointUnreadable: a file cannot be read, which is no sign
                of damage; or this rank does not see a checkpoint that another rank has read.
        """
        expected = self.manifest().files
        problems = []
        for name in sorted(expected if files is None else files):
            try:
                problem = self._problem(name, expected[name], progress)
            except (CheckpointUnavailable, CheckpointUnreadable):
                raise
            except CheckpointError as error:
                problem = str(error)
            if problem is not None:
                problems.append(problem)
        return problems

    def _problem(self, name: str, wanted: Fingerprint, progress: OnBytes | None) -> str | None:
        where, size = self._files.where(name), self._files.size(name)
        if size is None and not self.is_complete():
            raise CheckpointUnavailable(
                f"{self.uri}: neither {name} nor {MANIFEST} is there, though the manifest was read "
                "just now: this machine does not see the place, or something removes checkpoints"
            )
        if size != wanted.bytes:
            found = "missing" if size is None else f"{size} bytes"
            return f"{where}: {found}, expected {wanted.bytes} bytes"
        found = fingerprint(self._files, name, progress)
        if found == wanted:
            return None
        return f"{where}: sha256 {found.sha256[:16]}..., expected {wanted.sha256[:16]}..."


class Place:
    """A location where a run saves and finds checkpoints, with one folder per step.

    `folder` is the path of a local or shared folder, and None for an object store.
    """

    def __init__(
        self, uri: str, folder: Path | None, store: "Store | None", patience: float = PATIENCE_S
    ) -> None:
        self.uri, self.folder, self._store, self.patience = uri, folder, store, patience

    @property
    def store(self) -> "Store":
        """The object store of a location that is not a folder."""
        assert self._store is not None, self.uri
        return self._store

    def folders(self) -> list[str]:
        """Return the sorted names of all folders that begin with "step_", complete or not.

        A location that does not exist has no folders.

        Raises:
            OSError, StoreError: the location cannot be read.
        """
        if self.folder is None:
            return self.store.list_folders(_STEP)
        try:
            with os.scandir(self.folder) as entries:
                return sorted(e.name for e in entries if e.name.startswith(_STEP) and e.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order.

        In an object store, this lists the folders and checks each for its manifest, because listing
        all files of hundreds of checkpoints takes minutes.

        Raises:
            OSError, StoreError: the location or one of its folders cannot be read.
        """
        found = [step for name in self.folders() if (step := step_of(name)) is not None]
        with ThreadPoolExecutor(_LOOKS) as pool:
            complete = pool.map(lambda step: self.checkpoint(step).is_complete(), found)
            return sorted(step for step, whole in zip(found, complete, strict=True) if whole)

    def recover(self) -> None:
        """Restore the name of a folder that a killed run was about to replace.

        The caller must own the location, because another run's save in progress looks the same.
        """
        if self.folder is None:
            return
        for name in self.folders():
            final = self.folder / name.removesuffix(REPLACED)
            if name.endswith(REPLACED) and step_of(final.name) is not None and not final.exists():
                os.replace(self.folder / name, final)

    def checkpoint(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step, without reading it."""
        if self.folder is not None:
            return Checkpoint(FolderFiles(self.folder / step_name(step)))
        return Checkpoint(StoreFiles(self.store, step_name(step)))

    def read_text(self, name: str) -> str | None:
        """Return the text of a small file next to the checkpoints, or None if it does not exist.

        Bytes that are not UTF-8 become U+FFFD, so that the parser of the text reports the damage
        with the name of the file.

        Raises:
            OSError, StoreError: the file cannot be read, though it may exist.
        """
        if self.folder is not None:
            try:
                return (self.folder / name).read_text(errors="replace")
            except (FileNotFoundError, NotADirectoryError):
                return None
        from data_pipeline.store.open import MissingKey

        try:
            return self.store.get(name).decode(errors="replace")
        except MissingKey:
            return None

    def write_text(self, name: str, text: str) -> None:
        """Write a small file next to the checkpoints; readers see the old or the new file."""
        if self.folder is None:
            self.store.put(name, text.encode())
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{name}.{os.getpid()}"
        with partial.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())  # otherwise the file might be empty after a power failure
        os.replace(partial, self.folder / name)

    def close(self) -> None:
        """End the threads of an object store."""
        if self._store is not None:
            self._store.close()


def open_place(uri: URI, patience: float = PATIENCE_S) -> Place:
    """Open a checkpoint location, without reading or creating anything.

    Args:
        uri: a path, "file:///folder", or "s3://bucket/prefix" with AWS's environment variables.
        patience: seconds without progress after which an object store counts as unavailable.

    Raises:
        ValueError: the kind of URI is not supported.
    """
    text = os.fspath(uri)
    scheme, rest = split_place("checkpoints at", text)
    if scheme in ("s3", "memory"):
        from data_pipeline.store.open import open_store

        return Place(text, None, open_store(text, patience=patience), patience)
    return Place(text, Path(rest).expanduser(), None)


def open_checkpoint(uri: URI) -> Checkpoint:
    """Open one checkpoint by its folder or s3:// URI, without reading it."""
    place = open_place(uri)
    if place.folder is not None:
        return Checkpoint(FolderFiles(place.folder))
    return Checkpoint(StoreFiles(place.store, ""))
