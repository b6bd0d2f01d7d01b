"""Reports the content of a checkpoint from its manifest and headers, and norms on request."""

import fnmatch
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kimi_pretrain.weights import fp8
from kimi_pretrain.weights.int4 import PARTS
from kimi_pretrain.weights.matching import OPTIMIZER
from kimi_pretrain.weights.shapes import part_of
from kimi_pretrain.weights.weight_reader import CONFIG, TensorHeader, WeightReader

_PART = 1 << 24  # numbers that are widened to float64 at a time


@dataclass
class Count:
    """Totals over the tensors of one part.

    Attributes:
        numbers: number of weights; a word of an INT4 matrix counts as eight, scales do not count.
        dtypes: dtypes as stored.
    """

    tensors: int = 0
    numbers: int = 0
    bytes: int = 0
    dtypes: tuple[str, ...] = ()

    def add(self, name: str, header: TensorHeader) -> None:
        """Add a tensor to the totals."""
        packed, *others = PARTS
        dtype = "int4" if name.endswith(packed) else str(header.dtype).removeprefix("torch.")
        numel = math.prod(header.shape)
        self.bytes += numel * header.dtype.itemsize
        if name.endswith((*others, fp8.SCALE)):
            return
        self.tensors += 1
        self.numbers += numel * (8 if dtype == "int4" else 1)
        self.dtypes = tuple(sorted({*self.dtypes, dtype}))


@dataclass(frozen=True)
class TensorFigures:
    """Figures of one tensor that was read: norm in float64, and largest magnitude."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    norm: float
    largest: float
    not_finite: int


def report(reader: WeightReader) -> dict[str, Any]:
    """Return the content of a folder of weights as plain values, from headers only.

    Returns:
        {"uri", "kind", "files", "bytes", "tensors", "parameters", "parts", "optimizer"}; for a
        checkpoint also its state, layout and so on. Parameters exclude routing biases.
    """
    parts: dict[str, Count] = {}
    optimizer: dict[str, Count] = {}
    for name, header in reader.headers.items():
        if name.startswith(OPTIMIZER):
            kind = name.split(".")[1]
            optimizer.setdefault(kind, Count()).add(name, header)
        else:
            parts.setdefault(part_of(name), Count()).add(name, header)
    counted = (count.numbers for part, count in parts.items() if part != "routing biases")
    found: dict[str, Any] = {
        "uri": reader.where,
        "kind": "hugging_face" if reader.manifest is None else "checkpoint",
        "tensors": len(reader.headers),
        "parameters": sum(counted),
        "parts": {part: asdict(parts[part]) for part in sorted(parts)},
        "optimizer": {kind: asdict(optimizer[kind]) for kind in sorted(optimizer)},
    }
    return found | (_of_folder(reader) if reader.manifest is None else _of_manifest(reader))


def _of_folder(reader: WeightReader) -> dict[str, Any]:
    config = reader.config or {}
    headers = reader.headers.values()
    return {
        "files": len({header.file for header in headers}),
        "bytes": sum(math.prod(h.shape) * h.dtype.itemsize for h in headers),
        "architecture": (config.get("architectures") or [f"no {CONFIG}"])[0],
    }


def _of_manifest(reader: WeightReader) -> dict[str, Any]:
    manifest = reader.manifest
    assert manifest is not None
    state = manifest.state
    return {
        "files": len(manifest.files) + 1,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "step": state.step,
        "optimizer_steps": state.optimizer_steps,
        "contents": manifest.contents,
        "dtype": manifest.dtype,
        "layout": manifest.layout,
        "seq_len": seq_len(reader),
        "loader": _position(state.loader),
        "versions": manifest.versions,
        "model": manifest.model,
    }


def seq_len(reader: WeightReader) -> int | None:
    """Return the row length of a checkpoint's training, or None if it is not recorded."""
    loader = {} if reader.manifest is None else reader.manifest.state.loader
    packing = loader.get("packing")
    found = packing.get("seq_len") if isinstance(packing, dict) else None
    return found if isinstance(found, int) else None


def _position(loader: dict[str, Any]) -> dict[str, Any]:
    """Return a summary of the loader's state."""
    keys = ("step", "window", "row", "seed")
    found = {key: loader[key] for key in keys if key in loader}
    if isinstance(loader.get("quarantine"), list):
        found["quarantined"] = len(loader["quarantine"])
    return found


def figures(reader: WeightReader, pattern: str) -> Iterator[TensorFigures]:
    """Read the tensors whose names match a pattern of * and ?, one at a time.

    Raises:
        ValueError: no name matches.
    """
    names = fnmatch.filter(reader.headers, pattern)
    if not names:
        first = next(iter(reader.headers), "none")
        raise ValueError(
            f"--tensors {pattern}: none of {len(reader.headers):,} names matches (the first is "
            f"{first}); '*' stands for anything, dots too"
        )
    for name in names:
        header = reader.headers[name]
        square, largest, bad = 0.0, 0.0, 0
        for part in reader.read(name).reshape(-1).split(_PART):
            numbers = part.double()
            square += float(numbers.square().sum())
            largest = max(largest, float(numbers.abs().max()) if len(numbers) else 0.0)
            bad += int((~torch.isfinite(numbers)).sum())
        dtype = str(header.dtype).removeprefix("torch.")
        norm = math.sqrt(square)
        yield TensorFigures(name, dtype, header.shape, header.file, norm, largest, bad)
