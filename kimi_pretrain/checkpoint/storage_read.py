"""Where checkpoints lie: a folder or an object store, and one checkpoint in it, for reading.

`storage_write` writes and removes. A checkpoint exists once its manifest.json does; everything else
under a step's name is an incomplete save, which is never read.
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

# What a folder is called while one of the same step takes its place.
REPLACED = ".replaced"
_STEP = "step_"  # as all names of checkpoints begin
_LOOKS = 16  # for manifests, at a time


class Checkpoint:
    """One checkpoint folder, read without trust: every name and number in it is checked.

    May be used from several threads.
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
            CheckpointError: it is not complete, or its manifest is damaged.
        """
        return self._manifest

    def manifest_problems(self) -> list[str]:
        """Return what is damaged of a manifest that is there: one line, or none.

        Raises:
            CheckpointError: there is none, or it cannot be read.
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
        """Log a warning where the manifest is of a version without a hash of its own."""
        if not self.manifest().hashed:
            log.warning(
                "%s: its %s was written without a hash of its own: damage to the step or to the "
                "loader's position would not be noticed", self.uri, MANIFEST,
            )  # fmt: skip

    def manifest_sha256(self) -> str:
        """Return the SHA-256 of manifest.json as it is stored. Raises as `manifest`."""
        return hashlib.sha256(self._text(MANIFEST, MOST_MANIFEST_BYTES)).hexdigest()

    @property
    def step(self) -> int:
        """Steps done when it was written."""
        return self.manifest().state.step

    @property
    def files(self) -> dict[str, int]:
        """File -> bytes, as the manifest says, but for the manifest itself."""
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
        """Whether there is a manifest, as seen from here at this moment. Raises as `Files`."""
        return self._files.size(MANIFEST) is not None

    def texts(self) -> dict[str, bytes]:
        """Return manifest and index as they are stored, for a job's other ranks to `know`.

        Raises:
            CheckpointError: there is no manifest, or one of them is of absurd size or missing.
        """
        return {
            MANIFEST: self._text(MANIFEST, MOST_MANIFEST_BYTES),
            INDEX: self._text(INDEX, MOST_INDEX_BYTES),
        }

    def know(self, texts: Mapping[str, bytes]) -> None:
        """Use these as manifest and index, and read neither: another rank has read them."""
        self._texts = dict(texts)

    def weight_map(self) -> dict[str, str]:
        """Return tensor -> file. Raises as `manifest`."""
        return self._weight_map

    def entry(self, name: str) -> TensorEntry:
        """Return type, shape and place of a tensor.

        Raises:
            CheckpointError: there is none of this name, or its file is damaged.
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
        """Return the tensors of one file, read once."""
        if file not in self._headers:
            self._headers[file] = read_header(self._files, file, self.files[file])
        return self._headers[file]

    def read_into(self, name: str, tensor: "Tensor") -> None:
        """Fill a tensor, on any device, in place.

        Raises:
            CheckpointError: no such tensor, another shape or type, or a file that is cut off.
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
        """Return one tensor on the host. Raises as `read_into`."""
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
            files: names; None: all. The manifest must hold them.
            progress: called with the bytes that were just read.

        Returns:
            one line for each file that is not as it was written: its name, what was found and what
            was expected.

        Raises:
            CheckpointError: the manifest itself is missing or damaged.
            CheckpointUnavailable, CheckpointUnreadable: a file cannot be read, which is no sign
                of damage; or the whole checkpoint, known from another rank, is not seen from here.
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
    """A folder of checkpoints, one a step: where a run saves and finds them.

    `folder` is that of a local or shared place; None: it is an object store.
    """

    def __init__(
        self, uri: str, folder: Path | None, store: "Store | None", patience: float = PATIENCE_S
    ) -> None:
        self.uri, self.folder, self._store, self.patience = uri, folder, store, patience

    @property
    def store(self) -> "Store":
        """The object store of a place that is no folder."""
        assert self._store is not None, self.uri
        return self._store

    def folders(self) -> list[str]:
        """Return the names of all folders here that begin with "step_", complete or not, sorted.

        Raises:
            OSError, StoreError: the place cannot be read; where nothing is, it is empty.
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

        An object store is asked for the folders and, of each, for the manifest: to list all files
        of hundreds of checkpoints takes minutes.

        Raises:
            OSError, StoreError: the place, or a manifest's place in it, cannot be read.
        """
        found = [step for name in self.folders() if (step := step_of(name)) is not None]
        with ThreadPoolExecutor(_LOOKS) as pool:
            complete = pool.map(lambda step: self.checkpoint(step).is_complete(), found)
            return sorted(step for step, whole in zip(found, complete, strict=True) if whole)

    def recover(self) -> None:
        """Restore the name of a folder that a killed run was about to replace by a newer one.

        Only where the place belongs to the caller: in the middle of another run's save it looks the
        same.
        """
        if self.folder is None:
            return
        for name in self.folders():
            final = self.folder / name.removesuffix(REPLACED)
            if name.endswith(REPLACED) and step_of(final.name) is not None and not final.exists():
                os.replace(self.folder / name, final)

    def checkpoint(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step; nothing is read yet."""
        if self.folder is not None:
            return Checkpoint(FolderFiles(self.folder / step_name(step)))
        return Checkpoint(StoreFiles(self.store, step_name(step)))

    def read_text(self, name: str) -> str | None:
        """Return the text of a small file beside the checkpoints; None: it is not there.

        Bytes that are no UTF-8 become U+FFFD, so who reads the text tells of the damage by name.

        Raises:
            OSError, StoreError: it cannot be read, which does not mean that it is not there.
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
        """Write a small file beside the checkpoints: readers see the old one or the new one."""
        if self.folder is None:
            self.store.put(name, text.encode())
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{name}.{os.getpid()}"
        with partial.open("w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())  # or after a loss of power it might be empty
        os.replace(partial, self.folder / name)

    def close(self) -> None:
        """End the threads of an object store."""
        if self._store is not None:
            self._store.close()


def open_place(uri: URI, patience: float = PATIENCE_S) -> Place:
    """Open a folder of checkpoints; nothing is read or made.

    Args:
        uri: a path, "file:///folder", or "s3://bucket/prefix" with AWS's own environment variables.
        patience: seconds without progress after which an object store counts as gone.

    Raises:
        ValueError: no such kind of URI.
    """
    text = os.fspath(uri)
    scheme, rest = split_place("checkpoints at", text)
    if scheme in ("s3", "memory"):
        from data_pipeline.store.open import open_store

        return Place(text, None, open_store(text, patience=patience), patience)
    return Place(text, Path(rest).expanduser(), None)


def open_checkpoint(uri: URI) -> Checkpoint:
    """Open one checkpoint's folder, or its s3:// URI; nothing is read yet."""
    place = open_place(uri)
    if place.folder is not None:
        return Checkpoint(FolderFiles(place.folder))
    return Checkpoint(StoreFiles(place.store, ""))
