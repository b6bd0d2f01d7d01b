"""Attention within each item of a pack, never across items.

Three functions share one signature: a plain reference for tests, `scaled_dot_product_attention`
item by item (any device, any float type), and torch's variable-length kernel for CUDA. `choose`
selects one of them.

Shape suffixes: L packed patches, N heads, H head width.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

FLASH_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Segments:
    """Boundaries of the items of a pack.

    Args:
        lengths: patches of each item.
        cu_seqlens: int32 [items + 1] on the pack's device: 0, then the end of each item.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Segments":
        """Return consecutive segments of the given lengths."""
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        return cls(tuple(lengths), torch.from_numpy(ends).to(device))


def attend_reference(q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor, segments: Segments) -> Tensor:
    """Compute softmax(q k / sqrt(H)) v in every segment, [L, N, H], by the definition."""
    out = []
    parts = (x.split(segments.lengths) for x in (q_LNH, k_LNH, v_LNH))
    for q, k, v in zip(*parts):
        logits = einsum(q, k, "i n h, j n h -> n i j") * q.shape[-1] ** -0.5
        out.append(einsum(logits.softmax(-1), v, "n i j, j n h -> i n h"))
    return torch.cat(out)


def attend_sdpa(q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor, segments: Segments) -> Tensor:
    """Compute attention with one fused call per segment, [L, N, H]."""
    whole = (rearrange(x, "l n h -> 1 n l h") for x in (q_LNH, k_LNH, v_LNH))
    parts = zip(*(x.split(segments.lengths, dim=2) for x in whole))
    # The kernel writes [l, n, h], so this transpose moves no data.
    out = [F.scaled_dot_product_attention(*part).transpose(1, 2) for part in parts]
    return torch.cat(out, dim=1)[0]


def attend_varlen(q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor, segments: Segments) -> Tensor:
    """Compute attention of all segments in one FlashAttention call, [L, N, H].

    Requires CUDA and bfloat16 or float16. The backward pass is deterministic only under
    `torch.use_deterministic_algorithms(True)`.
    """
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = segments.cu_seqlens, max(segments.lengths)
    out_LNH = varlen_attn(q_LNH, k_LNH, v_LNH, ends, ends, longest, longest)
    assert isinstance(out_LNH, Tensor)  # a tuple is returned only on request of the log-sum
    return out_LNH


Attend = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]


def attend(q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor, segments: Segments) -> Tensor:
    """Compute attention in each segment with the best function for the device and dtype.

    Args:
        q_LNH, k_LNH, v_LNH: queries, keys and values [L, heads, head_dim] of the packed items.

    Returns:
        [L, heads, head_dim] in the inputs' dtype.
    """
    capability = torch.cuda.get_device_capability(q_LNH.device) if q_LNH.is_cuda else (0, 0)
    function, reason = choose(q_LNH.device.type, q_LNH.dtype, q_LNH.shape[-1], capability)
    if reason:
        _log_once(reason)
    return function(q_LNH, k_LNH, v_LNH, segments)


def choose(
    device_type: str, dtype: torch.dtype, head_dim: int, capability: tuple[int, int]
) -> tuple[Attend, str]:
    """Return the attention function, and why it is slower than necessary ("" if it is not)."""
    if device_type in ("cpu", "meta"):
        return attend_sdpa, ""
    if device_type != "cuda":
        return attend_sdpa, f"no variable-length kernel is known for {device_type}"
    if dtype not in FLASH_DTYPES:
        return attend_sdpa, f"the variable-length kernel takes bfloat16 or float16, not {dtype}"
    if head_dim % 8 or head_dim > 256:
        return attend_sdpa, f"head_dim {head_dim} is not a multiple of 8 up to 256"
    if capability < (8, 0):
        return attend_sdpa, f"compute capability {capability} is below (8, 0)"
    return attend_varlen, ""


@lru_cache(maxsize=32)
def _log_once(reason: str) -> None:
    logger.warning("MoonViT attention runs item by item: %s", reason)
