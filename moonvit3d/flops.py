"""Floating-point operations of the encoder, for cost models. numpy only.

Counts the matrix products of the forward pass, two operations per multiply-add. The position
interpolation is omitted: at Kimi K2.5's size it is 0.03% of the linear part.
"""

from collections.abc import Sequence

import numpy as np

from moonvit3d.config import MoonViTConfig
from moonvit3d.geometry import PATCH, num_tokens


def flops(
    grids: Sequence[tuple[int, int, int]] | np.ndarray, config: MoonViTConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return the forward operations of each item, projector included.

    Args:
        grids: (t, h, w) patch grids, or an integer array [n, 3].
        config: sizes of the encoder.

    Returns:
        (linear, quadratic), both int64 [n]: the operations that grow with an item's patches, and
        those of the attention products, which grow with their square. A backward pass costs twice
        the forward pass.
    """
    t, h, w = np.asarray(grids, dtype=np.int64).reshape(-1, 3).T
    patches, tokens = t * h * w, num_tokens(t, h, w)
    width = config.width
    embed = 3 * PATCH * PATCH * width
    block = 4 * width * width + 2 * width * config.mlp_width
    projector = config.projector_width * (4 * width + config.out_width)
    linear = 2 * (patches * (embed + config.depth * block) + tokens * projector)
    return linear, 4 * config.depth * width * patches**2
