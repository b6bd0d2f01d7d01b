"""Stores activations as E4M3 codes in tiles of 1x128 with fp32 scales (K2 report, section 2.4.3).

FP8 is used for storage only; all compute is in higher precision. A tile's largest value is scaled
to 448, the largest E4M3 value. Without scales, inputs around 1e-3 would fall below E4M3's smallest
steps, and gradients would silently be wrong by 80-110%. A tile with a non-finite value is restored
as NaN, so that the error is visible.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_pretrain.memory.pointwise import one_kernel

TILE = 128
_LARGEST = 448.0  # of E4M3, which has no infinity
_CAPABILITY = (8, 9)  # the first with E4M3 in Triton, which compiles `to_fp8` on CUDA
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # for tiles of zeros


def fp8_problem(device: torch.device) -> str | None:
    """Return the reason why the casts cannot run on a device, or None.

    An uncompiled cast runs on every CUDA device, but makes an fp32 copy of the experts' tokens.
    """
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_capability(device)
    if found >= _CAPABILITY:
        return None
    return (
        f"needs compute capability {_dotted(_CAPABILITY)} or more, for which Triton compiles casts "
        f"to E4M3, and {device} has {_dotted(found)}; set train.fp8_storage=false"
    )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@one_kernel
def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes float8_e4m3fn [..., width] and scales fp32 [..., tiles].

    Args:
        x: [..., width], any floating type. The last tile is shorter if 128 does not divide the
            width.
    """
    width = x.shape[-1]
    tiles = _tiles(x)
    scales = (tiles.abs().amax(-1) / _LARGEST).clamp(min=_SMALLEST_SCALE)
    codes = (tiles / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes.flatten(-2)[..., :width].contiguous(), scales


@one_kernel
def from_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values [..., width] for codes and scales from `to_fp8`."""
    width = codes.shape[-1]
    return (_tiles(codes) * scales.unsqueeze(-1)).flatten(-2)[..., :width].to(dtype).contiguous()


def _tiles(x: Tensor) -> Tensor:
    """Return fp32 [..., tiles, 128], padded with zeros after the width."""
    wide = x.float()
    if missing := -x.shape[-1] % TILE:
        wide = F.pad(wide, (0, missing))
    return wide.unflatten(-1, (wide.shape[-1] // TILE, TILE))
