"""Writes safetensors files from tensors that are made one at a time, and their index.

Sizes are known before the first byte, so the headers can come first, and little more than one
tensor is in memory. The folder gets its final name once it is complete.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torch import Tensor

from moonvit3d.safetensors_io import (
    INDEX,
    TensorEntry,
    is_aligned,
    layout_of,
    split_by_size,
    wide_first,
    write_tensors,
)


class OutputTensor(NamedTuple):
    """A tensor to write, and its source; tensors of one source may be made together."""

    name: str
    source: str
    entry: TensorEntry


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill; rename it to its final name at the end, or remove it on an error.

    Raises:
        ValueError: the folder exists, or another call is writing it or left it incomplete.
        FileNotFoundError: the parent folder does not exist.
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


def write(
    folder: Path,
    tensors: Sequence[OutputTensor],
    make: Callable[[str], Mapping[str, Tensor]],
    limit: int,
    progress: Callable[[int], object] = lambda _: None,
) -> dict[str, str]:
    """Write files and index into an existing folder.

    In a file in which some tensor would not be aligned, the wide dtypes come first.

    Args:
        tensors: tensors in the order in which they are divided among files.
        make: returns all tensors of a source, by name; called once per source.
        limit: bytes of tensors per file.
        progress: called with the bytes of every tensor that was written.

    Returns:
        name -> file.
    """
    entries = {tensor.name: tensor.entry for tensor in tensors}
    sources = {tensor.name: tensor.source for tensor in tensors}
    sizes = {name: entry.nbytes for name, entry in entries.items()}
    files = split_by_size(sizes, limit)
    weight_map: dict[str, str] = {}
    made: dict[str, Tensor] = {}  # tensors that are made but not yet written

    def take(name: str) -> Tensor:
        if name not in made:
            made.update(make(sources[name]))
        return made.pop(name)

    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        held = {name: entries[name] for name in names}
        layout = layout_of(held if is_aligned(held) else wide_first(held))
        with synced(folder / file) as out:
            write_tensors(out, layout, take, progress)
        weight_map |= dict.fromkeys(names, file)
    metadata = {"total_size": sum(sizes.values())}
    write_json(
        folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    )
    return weight_map


def write_json(file: Path, value: object) -> None:
    """Write indented JSON."""
    with synced(file) as out:
        out.write((json.dumps(value, indent=2) + "\n").encode())


@contextmanager
def synced(file: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; its bytes are on disk when it closes."""
    with file.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())
