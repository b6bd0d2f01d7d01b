"""What encoding one media item costs: the load that the assignment balances.

FLOPs of a forward plus a recomputed forward and its backward (4 forwards in all), linear terms of
the projections and MLPs plus the quadratic term of attention over the item's own patches.
"""

import numpy as np

from moonvit3d.config import MoonViTConfig
from moonvit3d.flops import flops

FORWARDS_PER_STEP = 4.0  # forward, recompute, and a backward of twice a forward


def item_costs(grids: np.ndarray, config: MoonViTConfig) -> np.ndarray:
    """Return the training FLOPs of each item, float64 [items].

    Args:
        grids: patch grids (frames, height, width), integers [items, 3].
    """
    linear, quadratic = flops(grids, config)
    return FORWARDS_PER_STEP * (np.asarray(linear, float) + np.asarray(quadratic, float))
