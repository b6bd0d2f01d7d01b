"""Checks that patches match the stated grids."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moonvit3d.geometry import MAX_FRAMES, MERGE, PATCH
from moonvit3d.positions import ROTARY_SIDE, Grid
from moonvit3d.share import Share

Grids = Sequence[Grid] | np.ndarray | Tensor


def checked_grids(patches: Tensor, grids: Grids, share: Share | None = None) -> list[Grid]:
    """Return the grids as tuples; raise ValueError if they are invalid or do not match the patches.

    With a share there is one grid, that of the whole item, and the share accounts for the patches.
    """
    table = np.asarray(grids.tolist() if isinstance(grids, Tensor) else grids, dtype=np.int64)
    if table.size and (table.ndim != 2 or table.shape[1] != 3):
        raise ValueError(f"grids of shape {table.shape}: want (t, h, w) of each item")
    grids = [(t, h, w) for t, h, w in table.reshape(-1, 3).tolist()]
    if patches.shape[1:] != (3, PATCH, PATCH):
        raise ValueError(f"patches of shape {tuple(patches.shape)}: want [L, 3, {PATCH}, {PATCH}]")
    if patches.dtype != torch.uint8 and not patches.is_floating_point():
        raise ValueError(f"patches are {patches.dtype}: want uint8 pixels or normalised floats")
    for i, (t, h, w) in enumerate(grids):
        if not 1 <= t <= MAX_FRAMES:
            raise ValueError(f"item {i} has grid {(t, h, w)}: want 1 to {MAX_FRAMES} frames")
        if h % MERGE or w % MERGE or not (0 < h <= ROTARY_SIDE and 0 < w <= ROTARY_SIDE):
            raise ValueError(
                f"item {i} has grid {(t, h, w)}: sides must be even, 2 to {ROTARY_SIDE}; "
                "take grids from moonvit3d.geometry"
            )
    wanted = sum(t * h * w for t, h, w in (grids if share is None else [share.strip]))
    if wanted != patches.shape[0]:
        whose = "the grids add up to" if share is None else f"a share of {share.tokens} holds"
        raise ValueError(f"{whose} {wanted} patches, but {patches.shape[0]} came")
    # uint8 pixels are always finite, so the usual path needs no check.
    if patches.is_floating_point() and patches.device.type != "meta":
        _check_numbers(patches, grids)
    return grids


def _check_numbers(patches: Tensor, grids: Sequence[Grid]) -> None:
    # one cheap pass if all values are finite
    if math.isfinite(patches.detach().sum(dtype=torch.float32)):
        return
    bad = ~torch.isfinite(patches).flatten(1).all(1)
    if not bool(bad.any()):
        return
    patch = int(bad.nonzero()[0, 0])
    ends = np.cumsum([t * h * w for t, h, w in grids])
    item = int(np.searchsorted(ends, patch, side="right"))
    raise ValueError(f"item {item} with grid {tuple(grids[item])} has pixels that are NaN or inf")
