"""Reads and writes the safetensors format: a header with the location of each tensor, then the
data.

    8 bytes      length of the header, little-endian
    header       JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}}, padded with spaces
    data         tensors one after the other, without gaps, little-endian, row-major

The `safetensors` library (0.8.0) reads local files for `moonvit3d.files`. It does not read a header
from an object store, it cannot write a file tensor by tensor (its issues 291 and 458), and it
writes metadata in random order (584), so that equal tensors give different files.

A header is untrusted, so it is checked completely before any tensor is read: known dtypes, sizes
that match shapes, no gaps, no overlap, no byte outside the file. Importing this module does not
import torch; functions that take tensors do.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Hugging Face's names of a model's file, and of the index from tensors to files.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Limit set by the format.
MAX_HEADER_BYTES = 100_000_000
_PREFIX = 8
_METADATA = "__metadata__"
_MAX_DIMS = 64
# The format's name of a dtype -> bytes per element, torch's name.
_TYPES = {
    "F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16"),
    "I64": (8, "int64"), "I32": (4, "int32"), "I16": (2, "int16"), "I8": (1, "int8"),
    "U64": (8, "uint64"), "U32": (4, "uint32"), "U16": (2, "uint16"), "U8": (1, "uint8"),
    "BOOL": (1, "bool"), "C64": (8, "complex64"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"),
}  # fmt: skip


class SafetensorsError(ValueError):
    """Not a safetensors file, a damaged file, or a tensor that the format does not support."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: the format's name of its dtype, its shape, its offset in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _TYPES[self.dtype][0]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.itemsize * prod(self.shape)


@dataclass(frozen=True)
class FileLayout:
    """Layout of a file.

    Attributes:
        head: the file's first bytes: length and header.
        entries: name -> tensor, in the order of their bytes.
        size: bytes of the whole file.
    """

    head: bytes
    entries: dict[str, TensorEntry]
    size: int


def layout_of(
    tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None
) -> FileLayout:
    """Lay out tensors in one file, in the order given; ignores their offsets."""
    header: dict[str, Any] = {_METADATA: {"format": "pt", **(metadata or {})}}
    begins, end = [], 0
    for name, entry in tensors.items():
        begins.append(end)
        offsets = [end, end + entry.nbytes]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _PREFIX)
    start = _PREFIX + len(text)
    entries = {
        name: TensorEntry(entry.dtype, entry.shape, start + begin)
        for (name, entry), begin in zip(tensors.items(), begins, strict=True)
    }
    return FileLayout(struct.pack("<Q", len(text)) + text, entries, start + end)


def wide_first(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors by falling itemsize, else in order, so that each tensor is aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))


def is_aligned(tensors: Mapping[str, TensorEntry]) -> bool:
    """Return True if, in this order, each tensor starts at a multiple of its itemsize."""
    end = 0
    for entry in tensors.values():
        if end % entry.itemsize:
            return False
        end += entry.nbytes
    return True


def split_by_size(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide tensors among files of at most `limit` bytes, in order.

    A file is closed before it would exceed the limit; a larger tensor gets its own file.
    """
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def header_length(prefix: bytes, size: int, where: str) -> int:
    """Return the length of a header from the first 8 bytes of a file of `size` bytes.

    Raises:
        SafetensorsError: the length exceeds the file or the format's limit.
    """
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == _PREFIX else -1
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - _PREFIX):
        raise SafetensorsError(
            f"{where}: a header of {length} bytes in a file of {size}: this is no safetensors "
            "file, or a damaged one"
        )
    return length


def parse_header(text: bytes, size: int, where: str) -> dict[str, TensorEntry]:
    """Return the tensors of a file of `size` bytes from its header's JSON.

    Raises:
        SafetensorsError: the header is invalid.
    """
    values = _parse_object(text, where)
    start = _PREFIX + len(text)
    entries = {
        name: _parse_entry(name, value, start, where)
        for name, value in values.items()
        if name != _METADATA
    }
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise SafetensorsError(
                f"{where}: {name!r} begins at byte {entry.offset}, expected {end}: tensors overlap "
                "or leave a gap, the file is damaged"
            )
        end += entry.nbytes
    if end != size:
        raise SafetensorsError(f"{where}: {size} bytes, its header tells of {end}")
    return entries


def parse_metadata(text: bytes, where: str) -> dict[str, str]:
    """Return the metadata of a header's JSON.

    Raises:
        SafetensorsError: the text is not a JSON object, or the metadata are not strings.
    """
    found = _parse_object(text, where).get(_METADATA, {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise SafetensorsError(f"{where}: {_METADATA} of its header is {found!r:.200}, want texts")
    return found


def _parse_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SafetensorsError(
            f"{where}: its header is not JSON ({reason}); the file is damaged"
        ) from None
    if not isinstance(values, dict):
        raise SafetensorsError(f"{where}: its header is no JSON object")
    return values


def _parse_entry(name: str, value: Any, start: int, where: str) -> TensorEntry:
    found: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype: Any
    shape: Any
    offsets: Any
    dtype, shape, offsets = (found.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _TYPES:
        raise SafetensorsError(f"{where}: {name!r} has dtype {dtype!r}, which is not known here")
    if not _whole_numbers(shape) or len(shape) > _MAX_DIMS:
        raise SafetensorsError(f"{where}: {name!r} has shape {shape!r}, expected whole numbers")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise SafetensorsError(f"{where}: {name!r} has offsets {offsets!r}, expected two numbers")
    entry = TensorEntry(dtype, tuple(shape), start + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise SafetensorsError(
            f"{where}: {name!r} has {offsets[1] - offsets[0]} bytes, {dtype} {list(shape)} needs "
            f"{entry.nbytes}"
        )
    return entry


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, Sequence) and all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    )


# Tensors of torch ------------------------------------------------------------------------------


@cache
def torch_dtypes() -> "dict[str, torch.dtype]":
    """Return the format's dtype names -> torch dtypes."""
    import torch

    return {code: getattr(torch, name) for code, (_, name) in _TYPES.items()}


def torch_dtype(code: str) -> "torch.dtype":
    """Return torch's dtype for the format's name in a header."""
    return torch_dtypes()[code]


def entry_of(name: str, shape: Sequence[int], dtype: "torch.dtype") -> TensorEntry:
    """Return dtype and shape of a tensor as a file's entry.

    Raises:
        SafetensorsError: the format does not support the dtype.
    """
    codes = [code for code, known in torch_dtypes().items() if known == dtype]
    if not codes:
        raise SafetensorsError(f"{name}: safetensors has no type for {dtype}")
    return TensorEntry(codes[0], tuple(shape))


def bytes_of(tensor: "Tensor") -> memoryview:
    """Return the writable memory of a contiguous tensor on the host."""
    import torch

    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_at(buffer: "Tensor", entry: TensorEntry) -> "Tensor":
    """Return a view of a tensor in a file's bytes, uint8 [bytes], aligned to 8."""
    part = buffer[entry.offset : entry.offset + entry.nbytes]
    return part.view(torch_dtype(entry.dtype)).view(entry.shape)


def write_tensors(
    out: BinaryIO,
    layout: FileLayout,
    tensor_of: "Callable[[str], Tensor]",
    progress: Callable[[int], object] = lambda _: None,
) -> None:
    """Write a whole file, with one tensor at a time on the host.

    Args:
        tensor_of: returns a tensor by name, with the dtype and shape of the layout, on any device;
            called in file order.
        progress: called with the bytes of each written tensor.
    """
    out.write(layout.head)
    for name, entry in layout.entries.items():
        tensor = tensor_of(name)
        stated = (torch_dtype(entry.dtype), entry.shape)
        assert (tensor.dtype, tuple(tensor.shape)) == stated, (name, tensor.dtype, tensor.shape)
        out.write(bytes_of(tensor.detach().cpu().contiguous()))
        progress(entry.nbytes)
