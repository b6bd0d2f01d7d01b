"""Packs and unpacks INT4 weights of compressed-tensors ("pack-quantized", groups of 32). Pure.

Kimi K2.5's routed experts are released in this symmetric format. A matrix [out, in] is stored as
three tensors:

    weight_packed  int32 [out, in / 8]: eight numbers -8 ... 7 in a word, each plus 8, lowest first
    weight_scale   bfloat16 [out, in / 32]: one for 32 neighbours in a row
    weight_shape   int32 [2]: out, in

A weight is the stored number times its scale, rounded to the dtype of the scale. Results equal the
library's own compression and decompression (compressed-tensors 0.20.0) bit for bit.
"""

from typing import Any

import torch
from torch import Tensor

GROUP = 32
PARTS = ("weight_packed", "weight_scale", "weight_shape")
# Required properties of the weight groups in QUANTIZATION.
SCHEME: dict[str, Any] = {
    **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
    **{"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP},
}
_IN_WORD = 8
_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)

# The entry in Kimi K2.5's config.json; the `ignore` patterns leave only the routed experts.
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "re:.*lm_head.*",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def packed_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the three tensors of a matrix [out, in].

    Raises:
        ValueError: the shape is not a matrix, or `in` is not a multiple of the group size.
    """
    if len(shape) != 2 or shape[1] % GROUP:
        raise ValueError(
            f"shape {list(shape)}: INT4 takes matrices whose rows are groups of {GROUP} numbers"
        )
    out, width = shape
    shapes = ((out, width // _IN_WORD), (out, width // GROUP), (2,))
    return dict(zip(PARTS, shapes, strict=True))


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """Return the matrix [out, in] in the dtype of the scale.

    Args:
        packed: int32 [out, in / 8].
        scale: [out, in / 32], any floating-point dtype.
    """
    numbers = unpack(packed).unflatten(1, (-1, GROUP))
    return (numbers.to(scale.dtype) * scale[:, :, None]).flatten(1)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight_packed` and `weight_scale` of a matrix, scaled by the range of each group.

    The largest magnitude of a group maps to 7.5 steps from zero, as in the library's "minmax".
    Rounding then costs at most half a step, a fifteenth of that magnitude.

    Args:
        weight: [out, in] in any floating-point dtype, `in` a multiple of 32; used as bfloat16.
    """
    groups = weight.to(torch.bfloat16).unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2) / 7.5
    # As in the library: prevents 0 / 0 in groups of zeros.
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    numbers = torch.clamp(torch.round(groups / scale[:, :, None]), -8, 7)
    return pack(numbers.flatten(1).to(torch.int8)), scale


def pack(numbers: Tensor) -> Tensor:
    """Pack the numbers -8 ... 7, int8 [out, in], into int32 [out, in / 8]."""
    words = (numbers.to(torch.int32) + 8).unflatten(1, (-1, _IN_WORD))
    # The fields do not overlap, so a sum equals a bitwise or, even when int32 wraps.
    return (words << _SHIFTS).sum(2, dtype=torch.int32)


def unpack(packed: Tensor) -> Tensor:
    """Unpack int32 [out, in / 8] into the numbers -8 ... 7, int8 [out, in]."""
    words = (packed[:, :, None] >> _SHIFTS) & 15
    return (words - 8).to(torch.int8).flatten(1)
