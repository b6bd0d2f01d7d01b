"""Positions of patches: learned 2-D grid, fixed temporal code, 2-D rotary angles.

Kimi K2.5 report, section 4.2, with the details of the released code: a [64, 64, width] table
resampled bicubically to each item's grid, a sin-cos code per frame for chunks of several frames
only, and rotary angles from (x, y) on adjacent channel pairs, the same for every frame.

Shape suffixes: L packed patches, h/w grid rows and columns, G side of the learned table, C width, F
rotary frequencies (head_dim / 4), P rotary pairs (head_dim / 2).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moonvit3d import rows
from moonvit3d.geometry import MAX_FRAMES
from moonvit3d.share import Share

Grid = tuple[int, int, int]

ROTARY_SIDE = 512  # largest side, in patches, of the reference's rotary table


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for computing positions: float32, or float64 for float64 parameters."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=2048)
def bicubic_matrix(target: int, source: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix [target, source] that resamples one axis as bicubic `F.interpolate` does.

    Half-pixel centres (align_corners=False), no antialiasing. Resampling by a matrix product has a
    deterministic gradient, which `F.interpolate` lacks on CUDA. The rows come from `F.interpolate`
    on the identity: computing them directly rounds the sampling positions differently and triples
    the deviation. A cache entry has at most 512 x 64 numbers.
    """
    # A tensor created in inference mode could not be used by a later training step.
    with torch.inference_mode(False), torch.no_grad():
        identity = torch.eye(source, dtype=dtype, device="cpu")[None, None]
        matrix = F.interpolate(identity, (target, source), mode="bicubic", align_corners=False)
        return matrix[0, 0].to(device)


def temporal_code(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the fixed code [4, width] of a frame's position in its chunk: sines, then cosines."""
    omega = 1.0 / 10000 ** (torch.arange(0, width, 2, device=device).to(dtype) / width)
    angle = torch.outer(torch.arange(MAX_FRAMES, device=device).to(dtype), omega)
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class Positions(nn.Module):
    """Learned grid positions plus the fixed temporal code, added to the patch embeddings."""

    def __init__(self, side: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(side, side, width))

    def forward(self, grids: Sequence[Grid], share: Share | None = None) -> Tensor:
        """Return the position embedding of every patch.

        Args:
            grids: (t, h, w) of each item, at least one item.
            share: share of the only item; restricts the result to its patches.

        Returns:
            [L, C] in the working precision (float32, or float64 for a float64 table).
        """
        dtype = working_dtype(self.weight.dtype)
        time_TC = temporal_code(self.weight.shape[-1], dtype, self.weight.device)
        # Widen once, so that the gradients of all sizes accumulate in the wide dtype. All chunks of
        # a video, and all icons of one size, share a plane.
        table_GGC = self.weight.to(dtype)
        planes = {hw: resample(table_GGC, *hw) for hw in dict.fromkeys(g[1:] for g in grids)}
        if share is not None:
            cells = torch.from_numpy(share.cells)
            planes = {hw: plane_LC[cells] for hw, plane_LC in planes.items()}
        parts = []
        for t, h, w in grids:
            plane_LC = planes[h, w]
            if t == 1:
                parts.append(plane_LC)  # a single frame gets no temporal code, not even row 0
            else:
                parts.extend(plane_LC + time_C for time_C in time_TC[:t])
        return torch.cat(parts)


def resample(table_GGC: Tensor, h: int, w: int) -> Tensor:
    """Return the grid at h x w patches, [h * w, C]; at its own size, the unchanged table."""
    side, dtype, device = len(table_GGC), table_GGC.dtype, table_GGC.device
    if (h, w) != (side, side):
        rows_hG = bicubic_matrix(h, side, dtype, device)
        columns_wG = bicubic_matrix(w, side, dtype, device)
        table_GGC = torch.einsum("hg,gkc->hkc", rows_hG, table_GGC)
        table_GGC = torch.einsum("wk,hkc->hwc", columns_wG, table_GGC)
    return rearrange(table_GGC, "h w c -> (h w) c")


def rotary_frequencies(head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return the frequencies f_k = theta^(-4k / head_dim), [F]."""
    half = head_dim // 2
    return 1.0 / theta ** (torch.arange(0, half, 2, device="cpu").to(dtype) / half)


@lru_cache(maxsize=64)
def _rotary_table(
    head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [512, F] of position times frequency.

    The table has a fixed size, so that a patch's angles never depend on the rest of its pack.
    """
    with torch.inference_mode(False):
        frequencies = rotary_frequencies(head_dim, theta, dtype)
        angle = torch.outer(torch.arange(ROTARY_SIDE, device="cpu").to(dtype), frequencies)
        return angle.cos().to(device), angle.sin().to(device)


def rotary_angles(
    grids: Sequence[Grid], head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every patch's rotation, both [L, P].

    Pair 2k rotates by x * f_k and pair 2k + 1 by y * f_k (x = column, y = row); every frame of a
    chunk gets the same angles.
    """
    column_L, row_L = (torch.from_numpy(a).to(device) for a in patch_places(grids))
    cos, sin = (
        rearrange([table[column_L], table[row_L]], "xy l f -> l (f xy)")
        for table in _rotary_table(head_dim, theta, dtype, device)
    )
    return cos, sin


def patch_places(grids: Sequence[Grid]) -> tuple[np.ndarray, np.ndarray]:
    """Return column and row of every patch in packing order (frame, row, column), int64 [L]."""
    columns = [np.tile(np.arange(w), t * h) for t, h, w in grids]
    rows = [np.tile(np.repeat(np.arange(h), w), t) for t, h, w in grids]
    return np.concatenate(columns), np.concatenate(rows)


def rotate(x: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
    """Rotate adjacent channel pairs (2i, 2i + 1) of each head, in the angles' precision.

    Args:
        x: queries, keys or both: [L, ..., head_dim].
        cos_LP, sin_LP: from `rotary_angles`.

    Returns:
        Tensor with the shape and dtype of `x`.
    """
    even, odd = rearrange(x.to(cos_LP.dtype), "l ... (p two) -> two l ... p", two=2)
    between = (1,) * (x.ndim - 2)
    cos, sin = (angle.unflatten(1, (*between, -1)) for angle in (cos_LP, sin_LP))
    turned = [even * cos - odd * sin, even * sin + odd * cos]
    return rearrange(turned, "two l ... p -> l ... (p two)").to(x.dtype)


def rotate_qkv(qkv_LK: Tensor, rotary_LP: Tensor, heads: int, lengths: Sequence[int]) -> Tensor:
    """Rotate the queries and keys of a fused projection in place, as `rotate` does.

    The backward pass then keeps one copy of them, and there are no temporaries.

    Args:
        qkv_LK: [L, 3 * heads * head_dim] in the order q | k | v; overwritten, and returned.
        rotary_LP: cosine + i sine of each rotation, complex64 (complex128 for float64).
        lengths: patches of each item.
    """
    if torch.compiler.is_compiling():  # AOTAutograd loses gradients of overwritten inputs
        cos_LP, sin_LP = rotary_LP.real, rotary_LP.imag
        qkv = rearrange(qkv_LK, "l (three n h) -> l three n h", three=3, n=heads)
        turned = torch.cat([rotate(qkv[:, :2], cos_LP, sin_LP), qkv[:, 2:]], dim=1)
        return rearrange(turned, "l three n h -> l (three n h)")
    return _RotateQKV.apply(qkv_LK, rotary_LP, heads, rows.spans(qkv_LK, lengths))


class _RotateQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_LK: Tensor, rotary_LP: Tensor, heads: int, spans: Sequence[int]
    ) -> Tensor:
        ctx.mark_dirty(qkv_LK)
        ctx.turn, ctx.heads, ctx.spans = rotary_LP, heads, spans
        return _turn(qkv_LK, rotary_LP, heads, spans)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        back_LP = ctx.turn.conj().resolve_conj()  # the gradient rotates in the opposite direction
        own = grads[0].clone(memory_format=torch.contiguous_format)
        return _turn(own, back_LP, ctx.heads, ctx.spans), None, None, None


def _turn(qkv_LK: Tensor, rotary_LP: Tensor, heads: int, spans: Sequence[int]) -> Tensor:
    qk = rearrange(qkv_LK, "l (three n h) -> l three n h", three=3, n=heads)[:, :2]
    exact = qk.to(rotary_LP.real.dtype)  # a copy only for bfloat16 and float16
    pairs = torch.view_as_complex(exact.unflatten(-1, (-1, 2)))
    for part, turn in zip(pairs.split(spans), rotary_LP[:, None, None].split(spans)):
        part.mul_(turn)
    if exact.dtype != qk.dtype:
        qk.copy_(exact)
    return qkv_LK
