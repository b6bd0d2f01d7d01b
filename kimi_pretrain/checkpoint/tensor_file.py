"""The safetensors format: a header that says where each tensor's bytes lie, then the bytes.

    8 bytes      length of the header, little-endian
    header       JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces
    data         tensors one after the other, without gaps, little-endian, row-major

Pure: sizes and texts, no files and no torch. A header may come from anywhere, so it is checked
completely before anything is read by it: known types, sizes that fit shapes, no gaps, no overlap,
no byte outside the file.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.manifest import parse_json

# Bytes of one element, by the format's name of the type.
ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "C64": 8},
    **{"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
    **{"F8_E4M3": 1, "F8_E5M2": 1},
}
# The format's own limit.
MOST_HEADER_BYTES = 100_000_000
_PREFIX = 8
_METADATA = "__metadata__"
_MOST_DIMS = 64


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        dtype: the format's name of its type; see `ITEM_BYTES`.
        shape: of the tensor.
        offset: of its first byte in the file, header included.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a file.

    Attributes:
        head: the file's first bytes: length and header.
        entries: name -> tensor, in the order of their bytes.
        size: bytes of the whole file.
    """

    head: bytes
    entries: dict[str, Entry]
    size: int


def layout_of(tensors: Mapping[str, Entry]) -> Layout:
    """Lay tensors out in one file: wide types first, so that every tensor is aligned, then by name.

    Args:
        tensors: name -> type and shape; their offsets are not looked at.
    """
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    begin = 0
    for name in order:
        entry = tensors[name]
        end = begin + entry.nbytes
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _PREFIX)
    start = _PREFIX + len(text)
    placed = {
        name: Entry(tensors[name].dtype, tensors[name].shape, start + offsets)
        for name in order
        for offsets in (header[name]["data_offsets"][0],)
    }
    return Layout(struct.pack("<Q", len(text)) + text, placed, start + begin)


def header_bytes(prefix: bytes, size: int, where: str) -> int:
    """Return the length of a header from the first 8 bytes of a file of `size` bytes.

    Raises:
        CheckpointError: the file is too short for it, or it is over the format's limit.
    """
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == _PREFIX else -1
    if not 2 <= length <= min(MOST_HEADER_BYTES, size - _PREFIX):
        raise CheckpointError(
            f"{where}: a header of {length} bytes in a file of {size}: this is no safetensors "
            "file, or a damaged one"
        )
    return length


def parse_header(text: bytes, size: int, where: str) -> dict[str, Entry]:
    """Return the tensors of a file from its header.

    Args:
        text: the header's JSON.
        size: bytes of the whole file.
        where: its name, for messages.

    Raises:
        CheckpointError: something that a reader could not rely on.
    """
    values = parse_json(text, where, MOST_HEADER_BYTES)
    if not isinstance(values, dict):
        raise CheckpointError(f"{where}: its header is no JSON object")
    start = _PREFIX + len(text)
    entries = {
        name: _parse_entry(name, value, start, where)
        for name, value in values.items()
        if name != _METADATA
    }
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise CheckpointError(
                f"{where}: {name!r} begins at byte {entry.offset}, expected {end}: tensors overlap "
                "or leave a gap, the file is damaged"
            )
        end += entry.nbytes
    if end != size:
        raise CheckpointError(f"{where}: {size} bytes, its header tells of {end}")
    return entries


def _parse_entry(name: str, value: Any, start: int, where: str) -> Entry:
    found: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype: Any
    shape: Any
    offsets: Any
    dtype, shape, offsets = (found.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where}: {name!r} has dtype {dtype!r}, which is not known here")
    if not _whole_numbers(shape) or len(shape) > _MOST_DIMS:
        raise CheckpointError(f"{where}: {name!r} has shape {shape!r}, expected whole numbers")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: {name!r} has offsets {offsets!r}, expected two numbers")
    entry = Entry(dtype, tuple(shape), start + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise CheckpointError(
            f"{where}: {name!r} has {offsets[1] - offsets[0]} bytes, {dtype} {list(shape)} needs "
            f"{entry.nbytes}"
        )
    return entry


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, Sequence) and all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    )
