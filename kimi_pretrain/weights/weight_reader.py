"""Reads tensors from safetensors files one at a time, located by their headers and verified.

A Hugging Face folder has one `model.safetensors`, or several files and an index that maps tensors
to files. A checkpoint of this project also has a manifest. Both may be on disk or in an object
store. Nothing is executed: a folder of pickles is refused.

A checkpoint's manifest holds the SHA-256 of its files. No tensor is returned before its file has
been verified against it. Hugging Face folders have no hashes.
"""

import os
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.file_access import (
    Files,
    FolderFiles,
    StoreFiles,
    read_header,
    read_metadata,
)
from kimi_pretrain.checkpoint.manifest import INDEX as CHECKPOINT_INDEX
from kimi_pretrain.checkpoint.manifest import (
    MANIFEST,
    MOST_INDEX_BYTES,
    Manifest,
    check_file_name,
    parse_json,
)
from kimi_pretrain.checkpoint.storage_read import Checkpoint, Place, open_checkpoint, open_place
from moonvit3d.files import KEY as SIZES_KEY
from moonvit3d.safetensors_io import INDEX, SINGLE, TensorEntry, bytes_of, torch_dtype

CONFIG = "config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp", ".npz", ".npy")
SUFFIX = ".safetensors"
_MOST_CONFIG_BYTES = 16 << 20
_THREADS = 16  # headers that are read concurrently


@dataclass(frozen=True)
class TensorHeader:
    """Header of a stored tensor: shape, torch dtype, file name, and byte offset in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    offset: int


@dataclass(frozen=True)
class WeightReader:
    """Tensors of a folder. Headers are read when it is opened, tensors on demand.

    A reader may be sent to other processes, which then read no headers.

    Attributes:
        where: the folder or URI.
        headers: headers of all tensors, by name, in name order.
        config: config.json of a Hugging Face folder, if present.
        manifest: manifest of a checkpoint of this project.
        stated: encoder sizes that `moonvit3d.weights` recorded in its file.
        manifest_sha256: SHA-256 of the manifest file.
    """

    where: str
    headers: Mapping[str, TensorHeader]
    config: Mapping[str, Any] | None = None
    manifest: Manifest | None = None
    stated: Mapping[str, Any] = field(default_factory=dict)
    manifest_sha256: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude open files and verification results, which each process creates for itself."""
        left_out = ("_files", "_verified")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    @cached_property
    def _files(self) -> Files:
        return _files_in(open_place(self.where))

    @cached_property
    def _verified(self) -> "_Verified":
        return _Verified(self)

    def verify(self, name: str) -> None:
        """Verify a tensor's file and the checkpoint's index against the manifest, once.

        Does nothing for a Hugging Face folder. May be called from any thread.

        Raises:
            CheckpointError: one of the files is damaged.
        """
        if self.manifest is not None:
            self._verified.check((CHECKPOINT_INDEX, self.headers[name].file))

    def mark_verified(self, files: Collection[str]) -> None:
        """Treat these files as verified: the ranks of a job have shared the hashing."""
        if self.manifest is not None:
            self._verified.whole.update(files)

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU in its stored dtype. May be called from any thread.

        Raises:
            CheckpointError: the tensor's file is damaged, missing or too short.
        """
        self.verify(name)
        header = self.headers[name]
        tensor = torch.empty(header.shape, dtype=header.dtype)
        if tensor.numel():
            self._files.read_into(header.file, header.offset, bytes_of(tensor))
        return tensor

    def place(self, name: str) -> str:
        """Return the file and name of a tensor, for messages."""
        return f"{self.where}/{self.headers[name].file}: {name}"


class _Verified:
    """Files of a checkpoint that have been verified so far."""

    def __init__(self, reader: WeightReader):
        assert reader.manifest is not None
        self.whole: set[str] = set()
        self._lock = threading.Lock()
        self._checkpoint = open_checkpoint(reader.where)
        self._checkpoint.know({MANIFEST: reader.manifest.text().encode()})

    def check(self, files: tuple[str, ...]) -> None:
        with self._lock:
            for file in files:
                if file not in self.whole:
                    if problems := self._checkpoint.verify([file]):
                        raise CheckpointError(f"{problems[0]}; take another checkpoint")
                    self.whole.add(file)


def open_weights(
    uri: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda name: True
) -> WeightReader:
    """Read the headers of a folder: a checkpoint of this project, or Hugging Face safetensors.

    Args:
        uri: a path or s3://bucket/prefix; or one .safetensors file or an index in a folder.
        wanted: filter for the names in an index; files that hold no wanted tensor are not opened.

    Raises:
        FileNotFoundError: the folder does not exist or has no weights.
        CheckpointError: the weights are pickled, or a file is missing or damaged.
    """
    folder, _, name = os.fspath(uri).rpartition("/")
    if name == INDEX:
        uri = folder or "."
    elif name.endswith(SUFFIX) and not Path(uri).is_dir():
        files = _files_in(open_place(folder or "."))
        if files.size(name) is None:
            raise FileNotFoundError(f"{os.fspath(uri)}: no such file")
        return _hugging_face(files, {name: None}, [name])
    files, names = _folder(uri)
    if MANIFEST in names:
        return checkpoint_weights(open_checkpoint(uri))
    if INDEX in names:
        return _hugging_face(files, _indexed(files, names, wanted), names)
    if SINGLE in names:
        return _hugging_face(files, {SINGLE: None}, names)
    raise _no_weights(files.uri, names)


def checkpoint_weights(checkpoint: Checkpoint) -> WeightReader:
    """Return the tensors of a checkpoint of this project, including the optimizer's.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
    """
    checkpoint.warn_if_unhashed()
    files = checkpoint.weight_map()
    with ThreadPoolExecutor(_THREADS) as pool:  # reads each file's header once, several at a time
        list(pool.map(checkpoint.header, sorted(set(files.values()))))
    headers = {name: _header(checkpoint.entry(name), files[name]) for name in sorted(files)}
    manifest, sha256 = checkpoint.manifest(), checkpoint.manifest_sha256()
    return WeightReader(checkpoint.uri, headers, manifest=manifest, manifest_sha256=sha256)


def and_more(count: int) -> str:
    """Return " (and N more)" for a message that names only the first item, or "" if N is 0."""
    return f" (and {count:,} more)" if count > 0 else ""


def _folder(uri: str | os.PathLike[str]) -> tuple[Files, list[str]]:
    """Return the files of a folder, and the names directly in it."""
    place = open_place(uri)
    if place.folder is None:
        names = [key for key in place.store.list() if "/" not in key]
        if not names:
            raise FileNotFoundError(f"{place.uri}: nothing there")
        return _files_in(place), names
    if not place.folder.is_dir():
        raise FileNotFoundError(f"{place.folder}: no such folder")
    return _files_in(place), sorted(path.name for path in place.folder.iterdir())


def _files_in(place: Place) -> Files:
    return StoreFiles(place.store, "") if place.folder is None else FolderFiles(place.folder)


def _no_weights(where: str, names: list[str]) -> Exception:
    if pickled := [name for name in names if name.endswith(PICKLES)]:
        return CheckpointError(
            f"{where}/{pickled[0]}: pickled weights can run any code when they are loaded, and are "
            "never read here; save the model as safetensors (save_pretrained of transformers does) "
            "and give that folder"
        )
    if "run.json" in names or "metrics.jsonl" in names:
        return FileNotFoundError(f"{where}: the folder of a run that holds no complete checkpoint")
    loose = [name for name in names if name.endswith(SUFFIX)]
    found = f"{len(loose)} .safetensors without an index" if loose else f"{len(names)} other files"
    return FileNotFoundError(
        f"{where}: no weights: expected {MANIFEST} of a checkpoint, {SINGLE} or {INDEX}; found "
        f"{found}"
    )


def _hugging_face(
    files: Files, wanted: Mapping[str, set[str] | None], names: list[str]
) -> WeightReader:
    """Read headers; `wanted` maps each file to its tensors, or to None for all tensors."""
    headers: dict[str, TensorHeader] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = pool.map(lambda file: read_header(files, file, files.size(file)), wanted)
        read = dict(zip(wanted, entries, strict=True))
    for file, some in wanted.items():
        held = read[file]
        if lost := sorted((some or set()) - held.keys()):
            raise CheckpointError(
                f"{files.where(file)}: no tensor {lost[0]!r}, where {INDEX} says it is"
                f"{and_more(len(lost) - 1)}"
            )
        headers |= {name: _header(held[name], file) for name in (held if some is None else some)}
    config = _json(files, CONFIG, _MOST_CONFIG_BYTES) if CONFIG in names else None
    stated = _stated(files, *wanted) if len(wanted) == 1 else {}
    return WeightReader(files.uri, dict(sorted(headers.items())), config, stated=stated)


def _stated(files: Files, file: str) -> dict[str, Any]:
    text = read_metadata(files, file, files.size(file)).get(SIZES_KEY, "{}")
    found = parse_json(text, files.where(file), _MOST_CONFIG_BYTES)
    if not isinstance(found, dict):
        raise CheckpointError(f"{files.where(file)}: metadata {SIZES_KEY} = {text!r}: want sizes")
    return found


def _indexed(
    files: Files, names: list[str], wants: Callable[[str], bool]
) -> dict[str, set[str] | None]:
    """Return file -> its wanted tensors, from an index."""
    where = files.where(INDEX)
    weight_map = _json(files, INDEX, MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: expected weight_map: tensor name -> file name")
    wanted: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        check_file_name(file, where)
        if not wants(name):
            continue
        if not file.endswith(SUFFIX):
            raise CheckpointError(
                f"{where}: {name!r} is in {file!r}: only safetensors are read, never pickles"
            )
        if file not in names:
            raise CheckpointError(f"{files.where(file)}: missing; {INDEX} places {name!r} there")
        some = wanted.setdefault(file, set())
        assert some is not None
        some.add(name)
    return dict(sorted(wanted.items()))


def _json(files: Files, name: str, most: int) -> dict[str, Any]:
    where, size = files.where(name), files.size(name) or 0
    if size > most:
        raise CheckpointError(f"{where}: {size} bytes, expected at most {most}")
    found = parse_json(files.read(name, 0, size), where, most)
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: expected a JSON object")
    return found


def _header(entry: TensorEntry, file: str) -> TensorHeader:
    return TensorHeader(entry.shape, torch_dtype(entry.dtype), file, entry.offset)
