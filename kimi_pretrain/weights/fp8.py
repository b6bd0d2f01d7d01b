"""Reads FP8 weights in the format of the DeepSeek-V3 and Kimi K2 releases. Pure.

A matrix [out, in] is stored as two tensors:

    weight             float8_e4m3fn [out, in]
    weight_scale_inv   float32 [ceil(out / 128), ceil(in / 128)]: one for each block of 128 x 128;
                       blocks at the lower and the right edge may be smaller

A weight is the stored number times the scale of its block, in float32, rounded to the wanted dtype,
as in DeepSeek's conversion to bfloat16. FP8 weights are never written.
"""

import torch
from torch import Tensor

BLOCK = 128
DTYPE = torch.float8_e4m3fn
SCALE = "weight_scale_inv"
# The entries of `quantization_config` in config.json for this format.
SCHEME = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix [out, in].

    Raises:
        ValueError: the shape is not a matrix.
    """
    if len(shape) != 2:
        raise ValueError(f"shape {list(shape)}: FP8 in blocks takes matrices")
    out, width = shape
    return -(-out // BLOCK), -(-width // BLOCK)


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Return a float8_e4m3fn matrix [out, in] in float32; scales are float32 of `scale_shape`."""
    found = weight.float()
    for number, rows in enumerate(found.split(BLOCK)):
        rows *= scale[number].repeat_interleave(BLOCK)[: weight.shape[1]]
    return found
