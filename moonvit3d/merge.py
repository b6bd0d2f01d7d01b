"""Merges patches into tokens: mean over a chunk's frames, then concatenation of 2x2 neighbours.

This is the "sd2_tpool" merger of Kimi K2.5 (report, section 4.2): four frames cost the tokens of
one.
"""

from collections.abc import Sequence

import torch
from einops import rearrange, reduce
from torch import Tensor

from moonvit3d.geometry import MERGE


def sd2_tpool(x_LC: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
    """Pool each item over time and group its patches into tokens.

    Args:
        x_LC: packed patches [L, C], items in order, each frame by frame and row by row.
        grids: (t, h, w) of each item, at least one item; h and w are even.

    Returns:
        [tokens, 4, C]: the four patches of a token in the order (0,0), (0,1), (1,0), (1,1).
    """
    items = x_LC.split([t * h * w for t, h, w in grids])
    return torch.cat([_pool(item, grid) for item, grid in zip(items, grids)])


def _pool(x_LC: Tensor, grid: tuple[int, int, int]) -> Tensor:
    t, h, _ = grid
    if t > 1:  # first over time, to round as the reference does
        x_LC = reduce(x_LC, "(t s) c -> s c", "mean", t=t)
    return rearrange(x_LC, "(h p w q) c -> (h w) (p q) c", p=MERGE, q=MERGE, h=h // MERGE)
