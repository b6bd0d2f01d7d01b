"""Tensors as bytes: the format's names of torch's types, and a tensor's own memory."""

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.tensor_file import Entry

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def entry_of(name: str, tensor: Tensor) -> Entry:
    """Return type and shape of a tensor as a file holds them.

    Raises:
        CheckpointError: the format has no such type.
    """
    if tensor.dtype not in NAMES:
        raise CheckpointError(f"{name}: safetensors has no type for {tensor.dtype}")
    return Entry(NAMES[tensor.dtype], tuple(tensor.shape))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the writable memory of a contiguous tensor on the host."""
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_at(buffer: Tensor, entry: Entry) -> Tensor:
    """Return the view of a tensor in a file's bytes.

    Args:
        buffer: the file, uint8 [bytes], aligned to 8.
        entry: where it lies in there.
    """
    part = buffer[entry.offset : entry.offset + entry.nbytes]
    return part.view(DTYPES[entry.dtype]).view(entry.shape)
