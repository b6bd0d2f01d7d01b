"""A device's share of one item that several devices encode together.

The item's tokens are divided among the devices, and each token comes with its 4 * t patches, so
that merging and projection need no communication. A device stores its patches as a strip: of each
frame, first the upper patches of all its tokens, then the lower patches. For per-patch and
per-token operations, a share is then an ordinary item of grid (t, 2, 2 * tokens). Two operations
involve the whole item: positions, which are looked up by `rows`, and attention, which the caller
supplies (`attend`), because this package does not know how devices communicate.
"""

from dataclasses import dataclass

import numpy as np

from moonvit3d.attention import Attend
from moonvit3d.geometry import MERGE

Grid = tuple[int, int, int]


def patch_rows(grid: Grid, tokens: range) -> np.ndarray:
    """Return the patches of an item that belong to a range of its tokens, in the order of a share.

    Args:
        grid: (t, h, w) of the whole item.
        tokens: consecutive tokens, in row order; may be empty.

    Returns:
        int64 [4 * t * len(tokens)]: indices in the item's own order (frame, row, column).

    Raises:
        ValueError: the item does not have these tokens.
    """
    t, h, w = grid
    most = (h // MERGE) * (w // MERGE)
    if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop <= most:
        raise ValueError(f"{tokens} of an item of {most} tokens, grid {grid}: want 0 to {most}")
    row, column = np.divmod(np.arange(tokens.start, tokens.stop, dtype=np.int64), w // MERGE)
    side = np.arange(MERGE)
    rows = MERGE * row[None, :, None] + side[:, None, None]  # [p, token, 1]
    columns = MERGE * column[None, :, None] + side[None, None, :]  # [1, token, q]
    frames = np.arange(t, dtype=np.int64)[:, None] * (h * w)
    return (frames + (rows * w + columns).ravel()).ravel()


@dataclass(frozen=True)
class Share:
    """Tokens of one item that this device encodes.

    Args:
        grid: (t, h, w) of the whole item.
        tokens: this device's tokens, consecutive; may be empty.
        attend: attention over the whole item. It maps queries, keys and values of this device's
            rows, [L, heads, head_dim] each, and their segments (first the share, then the rows that
            pad a CPU's pack) to the result for the same rows.
    """

    grid: Grid
    tokens: range
    attend: Attend

    @property
    def strip(self) -> Grid:
        """Grid of an ordinary item with the same patches and tokens, in this order."""
        return self.grid[0], MERGE, MERGE * len(self.tokens)

    @property
    def rows(self) -> np.ndarray:
        """Indices of the share's patches in the item, int64 [t * 4 * tokens]."""
        return patch_rows(self.grid, self.tokens)

    @property
    def cells(self) -> np.ndarray:
        """Indices of the share's patches within a frame, the same in every frame."""
        return patch_rows((1, *self.grid[1:]), self.tokens)
