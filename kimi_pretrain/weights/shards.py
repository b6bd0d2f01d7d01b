"""Writes safetensors files whose tensors come one at a time, and the index that names them.

Sizes are known before the first byte, so that headers come first, and of a model of whatever size
little more than one tensor is held. The folder gets its name when it is complete.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.memory import NAMES, bytes_of
from kimi_pretrain.weights.stored import INDEX

GIB = 1 << 30


@dataclass(frozen=True)
class Entry:
    """A tensor to write.

    Attributes:
        source: what it is made from; entries of one source may be made together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.dtype.itemsize * math.prod(self.shape)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill; it gets its name at the end, or is removed after an error.

    Raises:
        ValueError: there is something already, also what another call is making or has left.
        FileNotFoundError: the folder around it does not exist.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: choose another name, or remove it")
    if not folder.absolute().parent.is_dir():
        raise FileNotFoundError(f"{folder.absolute().parent}: no such folder to write into")
    partial = folder.with_name(folder.name + ".partial")
    try:
        partial.mkdir()
    except FileExistsError:
        raise ValueError(
            f"{partial} is there already, left by a command that was killed or still at work, or "
            "your own: remove it, or choose another name"
        ) from None
    try:
        yield partial
        if folder.is_dir():
            folder.rmdir()
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def cut(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """Divide tensors over files of at most `limit` bytes each, in their order.

    One that is larger has a file of its own. In a file in which some tensor would not lie at a
    multiple of its numbers' size, the wider types come first.
    """
    files: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not files or entry.nbytes > room:
            files.append([])
            room = limit
        files[-1].append(entry)
        room -= entry.nbytes
    wide_first = partial(sorted, key=lambda entry: -entry.dtype.itemsize)
    return [file if _aligned(file) else wide_first(file) for file in files]


def write(
    folder: Path,
    entries: Sequence[Entry],
    make: Callable[[str], Mapping[str, Tensor]],
    limit: int,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, str]:
    """Write files and index into a folder that is there.

    Args:
        make: from a source to all tensors of that source, by name; called once for each.
        limit: bytes of a file.
        progress: called with the bytes of every tensor that was written.

    Returns:
        name -> file.
    """
    files = cut(entries, limit)
    weight_map: dict[str, str] = {}
    made: dict[str, Tensor] = {}  # what waits for its turn
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with synced(folder / name) as out:
            out.write(header_of(file))
            for entry in file:
                if entry.name not in made:
                    made |= make(entry.source)
                _write(out, made.pop(entry.name), entry)
                progress(entry.nbytes)
        weight_map |= {entry.name: name for entry in file}
    total = sum(entry.nbytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)
    return weight_map


def header_of(entries: Sequence[Entry]) -> bytes:
    """Return what a safetensors file of these tensors, in this order, begins with."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        place = {"shape": list(entry.shape), "data_offsets": [start, end]}
        header[entry.name] = {"dtype": NAMES[entry.dtype], **place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(out: BinaryIO, tensor: Tensor, entry: Entry) -> None:
    assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry
    out.write(bytes_of(tensor.detach().cpu().contiguous()))


def _aligned(entries: Sequence[Entry]) -> bool:
    end = 0
    for entry in entries:
        if end % entry.dtype.itemsize:
            return False
        end += entry.nbytes
    return True


def write_json(file: Path, value: object) -> None:
    """Write JSON that people can read."""
    with synced(file) as out:
        out.write((json.dumps(value, indent=2) + "\n").encode())


@contextmanager
def synced(file: Path) -> Iterator[BinaryIO]:
    """A file whose bytes are on the disk when it is closed."""
    with file.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())
