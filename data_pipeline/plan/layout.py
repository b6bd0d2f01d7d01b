"""Computes the token counts of samples and the positions of their media, for many samples at once.

A sample is [bos] pieces [eos]; a media item is its prefix, one pad per embedding, and one closing
token. Sizes come from the index and `moonvit3d.geometry`, without reading any data.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.index.columns import PIECE_ITEM, SourceIndex
from data_pipeline.plan.csr import gather_rows, row_sums
from moonvit3d.geometry import PatchLimits, grids, num_tokens

# An image with fewer patches (64 patches are 16 tokens) is too small to be useful.
MIN_PATCHES = 64


@dataclass(frozen=True, eq=False)
class Layout:
    """Sizes of n samples and their m items.

    Attributes:
        length: int64 [n] tokens of each sample, bos and eos included.
        vision: int64 [n] media-pad tokens of each sample.
        item_ptr: int64 [n + 1] first item of each sample in the columns below, and the end.
        item: int64 [m] row of the item in the index.
        tokens: int32 [m] media-pad tokens of each item.
        start: int32 [m] first media-pad token of the item, counted from its sample's bos.
        grid: int32 [m, 3] frames, rows and columns of patches.
    """

    length: NDArray[np.int64]
    vision: NDArray[np.int64]
    item_ptr: NDArray[np.int64]
    item: NDArray[np.int64]
    tokens: NDArray[np.int32]
    start: NDArray[np.int32]
    grid: NDArray[np.int32]

    def of(self, samples: NDArray[np.integer]) -> "Layout":
        """Return the layout of some samples, given by their index in this layout."""
        at, ptr = gather_rows(self.item_ptr, samples)
        return Layout(
            self.length[samples],
            self.vision[samples],
            ptr,
            self.item[at],
            self.tokens[at],
            self.start[at],
            self.grid[at],
        )


@dataclass(frozen=True, eq=False)
class Changes:
    """Sizes of the pieces and items of n samples after augmentation, in order.

    Attributes:
        piece_tokens: int64 [pieces] tokens of each piece.
        height, width: int64 [items] size of each item in pixels.
    """

    piece_tokens: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]


def limits_at(limits: PatchLimits, level: int) -> PatchLimits:
    """Return the patch limits at a shrink level; each level has nine tenths of the one before.

    Limits do not fall below MIN_PATCHES; a limit that starts lower stays as it is.
    """
    image, frame = (
        max(min(MIN_PATCHES, value), value * 9**level // 10**level)
        for value in (limits.image, limits.frame)
    )
    return PatchLimits(image=image, frame=frame, side=limits.side)


def num_levels(limits: PatchLimits) -> int:
    """Return the last level; higher levels do not shrink the limits further."""
    level = 0
    while limits_at(limits, level) != limits_at(limits, level + 1):
        level += 1
    return level


def lay_out(
    index: SourceIndex,
    limits: PatchLimits,
    samples: NDArray[np.integer],
    level: NDArray[np.integer],
    changes: Changes | None = None,
) -> Layout:
    """Return the layout of samples under the patch limits.

    Args:
        index: index of the source.
        limits: patch limits to which images and frames are scaled down.
        samples: [n] sample numbers.
        level: [n] shrink level of each sample's media; 0 leaves the limits unchanged.
        changes: sizes of these samples after augmentation; None uses the stored sizes.
    """
    pieces, piece_ptr = gather_rows(index.piece_ptr, samples)
    items, item_ptr = gather_rows(index.item_ptr, samples)
    if changes is None:
        tokens = index.piece_tokens[pieces].astype(np.int64)
        height, width = index.item_height[items], index.item_width[items]
    else:
        tokens, height, width = changes.piece_tokens.copy(), changes.height, changes.width
    levels = np.repeat(np.asarray(level), np.diff(item_ptr))
    grid = np.empty((items.size, 3), np.int64)
    for number in np.unique(levels).tolist():
        chosen = np.flatnonzero(levels == number)
        at = items[chosen]
        grid[chosen] = grids(
            index.item_kind[at],
            index.item_frames[at],
            height[chosen],
            width[chosen],
            limits_at(limits, number),
        )
    pads = np.asarray(num_tokens(grid[:, 0], grid[:, 1], grid[:, 2]), np.int64)
    place = np.flatnonzero(index.piece_kind[pieces] == PIECE_ITEM)
    prefix = tokens[place]
    tokens[place] += pads + 1
    before = np.cumsum(tokens) - tokens
    owner = np.repeat(np.arange(len(samples)), np.diff(item_ptr))
    # Tokens before a sample's first piece; an empty sample at the very end has none.
    base = np.append(before, tokens.sum())[piece_ptr[:-1]]
    return Layout(
        length=2 + row_sums(tokens, piece_ptr),
        vision=row_sums(pads, item_ptr),
        item_ptr=item_ptr,
        item=items,
        tokens=pads.astype(np.int32),
        start=(1 + before[place] - base[owner] + prefix).astype(np.int32),
        grid=grid.astype(np.int32),
    )
