"""A share of one item: what one of several devices holds that encode the item together.

The item's tokens are divided, and a token brings its 4 * t patches along, so that merging and
projecting need nothing from elsewhere. A device holds its patches as a strip: of each frame first
the upper patches of all its tokens, then the lower ones. To whatever treats patches or tokens by
themselves a share is then an ordinary item of grid (t, 2, 2 * tokens). Two things are the whole
item's: positions, which are looked up by `rows`, and attention, which the caller supplies
(`attend`), because this package does not know how devices talk.
"""

from dataclasses import dataclass

import numpy as np

from moonvit3d.attention import Attend
from moonvit3d.geometry import MERGE

Grid = tuple[int, int, int]


def patch_rows(grid: Grid, tokens: range) -> np.ndarray:
    """Which patches of an item belong to a range of its tokens, in the order of a share.

    Args:
        grid: (t, h, w) of the whole item.
        tokens: consecutive tokens, in row order; may be empty.

    Returns:
        int64 [4 * t * len(tokens)]: places in the item's own order (frame, row, column).

    Raises:
        ValueError: tokens that the item does not have.
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
    """The tokens of one item that this device encodes.

    Args:
        grid: (t, h, w) of the whole item.
        tokens: this device's, consecutive; may be empty.
        attend: attention over the whole item: from queries, keys and values of this device's rows,
            [L, heads, head_dim] each, and the segments of what it holds (first the share, behind
            it the rows that fill up a CPU's pack), to the result for the same rows.
    """

    grid: Grid
    tokens: range
    attend: Attend

    @property
    def strip(self) -> Grid:
        """The grid of an ordinary item with as many patches and tokens, in this order."""
        return self.grid[0], MERGE, MERGE * len(self.tokens)

    @property
    def rows(self) -> np.ndarray:
        """Places of the share's patches in the item, int64 [t * 4 * tokens]."""
        return patch_rows(self.grid, self.tokens)

    @property
    def cells(self) -> np.ndarray:
        """Places of the share's patches in one frame, the same in every frame."""
        return patch_rows((1, *self.grid[1:]), self.tokens)
