"""Checkpoint files: opened without reading the data, read per tensor, written atomically.

A checkpoint is one safetensors file, or several files with an index from tensors to files. Only the
files that contain vision tensors are opened.
"""

import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moonvit3d import layouts
from moonvit3d.config import MoonViTConfig
from moonvit3d.layouts import NameScheme, Part, TensorHeader
from moonvit3d.safetensors_io import (
    INDEX,
    SINGLE,
    entry_of,
    layout_of,
    torch_dtypes,
    wide_first,
    write_tensors,
)

KEY = "moonvit3d"  # metadata key of the sizes
CONSTANTS = ("norm_eps", "rope_theta")
# An index may only name files in its own folder; an untrusted index could name any file.
_PLAIN = re.compile(r"[^/\\\0.][^/\\\0]*")
HEAD_DIM = 72  # as in Kimi and SigLIP-SO400M; no tensor shape shows the number of heads
POS_GRID = 64  # as in Kimi


@dataclass(frozen=True)
class VisionCheckpoint:
    """Open files whose tensors are read on demand.

    Args:
        prefix: common prefix of all names.
        files: tensor name -> file that contains it, including skipped tensors.
        headers: of every tensor that is not skipped.
        stated: the sizes recorded by `save` or `convert`; empty for files of other programs.
    """

    path: Path
    layout: NameScheme
    prefix: str
    files: Mapping[str, Path]
    handles: Mapping[Path, Any]
    headers: Mapping[str, TensorHeader]
    stated: Mapping[str, Any]

    def plan(self, config: MoonViTConfig, part: Part | None) -> dict[str, tuple[str, ...]]:
        """Call `layouts.plan`, add the file name to its errors, and check recorded constants."""
        try:
            _, makings = layouts.plan(self.headers, config, part)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        for name in ("heads", *CONSTANTS):  # values that no shape shows
            if self.stated.get(name, getattr(config, name)) != getattr(config, name):
                raise ValueError(
                    f"{self.path} was written with {name} = {self.stated[name]}: "
                    f"the config has {getattr(config, name)}"
                )
        return makings

    def read(self, name: str, sources: Sequence[str], config: MoonViTConfig) -> Tensor:
        """Return the released tensor `name`; raise ValueError if a value is not finite."""
        pieces = []
        for source in sources:
            piece = self.handles[self.files[source]].get_tensor(source)
            bad = ~torch.isfinite(piece)
            if bad.any():
                place = tuple(bad.nonzero()[0].tolist())
                raise ValueError(
                    f"{self.files[source]}: {source}{list(place)} is {piece[place].item()}: "
                    "want finite numbers"
                )
            pieces.append(piece)
        return layouts.assemble(self.layout, name, pieces, config)

    def of_part(self, part: Part) -> list[TensorHeader]:
        """Return the headers of a part's tensors; all layouts name the projector mm_projector."""
        projector = part == "mm_projector"
        return [h for name, h in self.headers.items() if ("mm_projector." in name) == projector]

    def shape_sizes(self) -> dict[str, int]:
        """Return the sizes that shapes show: all except the heads; the projector's if present."""
        block = "vision_tower.encoder.blocks.{i}."
        (fc0,) = self.layout.sources(f"{block}mlp.fc0.weight")
        numbered = re.escape(self.prefix + fc0).replace(re.escape("{i}"), r"(\d+)")
        found = [re.fullmatch(numbered, name) for name in self.headers]
        depth = 1 + max((int(match[1]) for match in found if match), default=-1)
        sizes = {"width": self._size("vision_tower.patch_embed.proj.bias"), "depth": depth}
        if depth:
            sizes["mlp_width"] = self._size(f"{block}mlp.fc0.weight".replace("{i}", "0"))
        side = self._size(layouts.POSITIONS)
        sizes["pos_grid"] = math.isqrt(side) if self.layout is layouts.SIGLIP else side
        if self.of_part("mm_projector"):
            sizes["projector_width"] = self._size("mm_projector.proj.0.bias")
            sizes["out_width"] = self._size("mm_projector.proj.2.bias")
        return sizes

    def _size(self, released: str) -> int:
        (source,) = self.layout.sources(released)
        header = self.headers.get(self.prefix + source)
        if header is None or not header.shape:
            raise ValueError(f"{self.path}: no {self.prefix}{source} to read a size from")
        return header.shape[0]

    def config(self, heads: int | None, pos_grid: int | None) -> MoonViTConfig:
        """Return the config of the encoder that this checkpoint fills."""
        sizes: dict[str, Any] = self.shape_sizes()
        sizes |= {name: self.stated[name] for name in CONSTANTS if name in self.stated}
        if self.layout is layouts.SIGLIP:
            sizes["pos_grid"] = POS_GRID if pos_grid is None else pos_grid
        elif pos_grid is not None:
            raise ValueError(
                f"{self.path}: pos_grid = {pos_grid}, but layout {self.layout.name} keeps its "
                f"grid of {sizes['pos_grid']}; only SigLIP's is resampled"
            )
        heads = self.stated.get("heads") if heads is None else heads
        if heads is None and sizes["width"] % HEAD_DIM:
            raise ValueError(
                f"{self.path}: width {sizes['width']} is no multiple of {HEAD_DIM}, so the number "
                "of attention heads cannot be guessed: give --heads"
            )
        sizes["heads"] = sizes["width"] // HEAD_DIM if heads is None else heads
        return MoonViTConfig(**sizes)


@contextmanager
def opened(path: Path) -> Iterator[VisionCheckpoint]:
    """Open the files that contain vision tensors and read their headers."""
    path = _find(path)
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        names: dict[Path, set[str]] = {}

        def enter(file: Path) -> None:
            handles[file] = stack.enter_context(_handle(file))
            names[file] = set(handles[file].keys())

        if path.suffix == ".json":
            files = _read_index(path)
        else:
            enter(path)
            files = dict.fromkeys(sorted(names[path]), path)
        try:
            layout, prefix = layouts.recognise(files)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        headers = {}
        for name, file in files.items():
            if name.startswith(layout.skipped):
                continue
            if file not in handles:
                if not file.is_file():
                    raise FileNotFoundError(f"{path} places {name} in {file}, which is missing")
                enter(file)
            if name not in names[file]:
                raise ValueError(f"{file}: no {name}, which {path} places there")
            piece = handles[file].get_slice(name)
            code: str = piece.get_dtype()
            known = torch_dtypes().get(code)
            dtype = known if known in layouts.FLOATS else code
            headers[name] = TensorHeader(tuple(piece.get_shape()), dtype)
        stated = _stated(path, handles[path].metadata()) if path in handles else {}
        yield VisionCheckpoint(path, layout, prefix, files, handles, headers, stated)


def _find(path: Path) -> Path:
    """Return the file or index for a path."""
    if path.is_dir():
        found = [path / name for name in (INDEX, SINGLE) if (path / name).is_file()]
        if len(found) > 1:
            raise ValueError(f"{path} holds both {INDEX} and {SINGLE}: name the one to read")
        if not found:
            raise FileNotFoundError(f"{path} holds neither {INDEX} nor {SINGLE}: name the file")
        return found[0]
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file or folder")
    return path


def _handle(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from None


def _read_index(path: Path) -> dict[str, Path]:
    try:
        places = json.loads(path.read_text())["weight_map"]
        for file in places.values():
            if not _PLAIN.fullmatch(file):
                raise ValueError(f"{file!r:.100} is no name of a file beside it")
        return {name: path.parent / file for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: want JSON whose weight_map names each tensor's file ({error})"
        ) from None


def _stated(path: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get(KEY, "{}")
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: metadata {KEY} = {text!r}: want JSON sizes ({error})") from None


def write(
    path: Path, tensors: Mapping[str, Tensor], sizes: Mapping[str, Any], overwrite: bool
) -> None:
    """Write a safetensors file with sizes as metadata; copy one tensor at a time to the host."""
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: overwrite=True (--overwrite) replaces it")
    entries = {name: entry_of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    layout = layout_of(wide_first(entries), {KEY: json.dumps(sizes)})
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:
            write_tensors(file, layout, tensors.__getitem__)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
