"""How many tokens a sample takes and where its media stand, for many samples at once.

A sample is [bos] pieces [eos]; a media item is its prefix, one pad per embedding, and one closing
token. Sizes come from the index and `moonvit3d.geometry`, so no byte of data is read to know them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.index.columns import PIECE_ITEM, SourceIndex
from data_pipeline.plan.csr import gather_rows, row_sums
from moonvit3d.geometry import PatchLimits, grids, num_tokens

# Below this many patches (16 tokens) a picture is no longer worth reading.
MIN_PATCHES = 64


@dataclass(frozen=True, eq=False)
class Layout:
    """Sizes of n samples and their m items.

    Attributes:
        length: int64 [n] tokens of each sample, bos and eos included.
        vision: int64 [n] media-pad tokens of each sample.
        item_ptr: int64 [n + 1] where each sample's items begin in the columns below.
        item: int64 [m] line of the item in the index.
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
        """Return the layout of some of the samples, by their place in this one."""
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
    """What chance makes of n samples, for their pieces and items in order.

    Attributes:
        piece_tokens: int64 [pieces] tokens of each piece as it is drawn.
        height, width: int64 [items] pixels of each item as it is drawn.
    """

    piece_tokens: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]


def limits_at(limits: PatchLimits, level: int) -> PatchLimits:
    """Return the patch limits at a shrink level: nine tenths of the level before.

    A limit stays at MIN_PATCHES once it is there, or where it was if it was below.
    """
    image, frame = (
        max(min(MIN_PATCHES, value), value * 9**level // 10**level)
        for value in (limits.image, limits.frame)
    )
    return PatchLimits(image=image, frame=frame, side=limits.side)


def num_levels(limits: PatchLimits) -> int:
    """Return the last level, beyond which nothing shrinks any more."""
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
    """Lay samples out under the patch limits.

    Args:
        index: their source.
        limits: how far pictures are scaled down.
        samples: [n] sample numbers.
        level: [n] shrink level of each sample's media, 0 for the limits as they are.
        changes: what augmentation makes of these samples; None leaves them as stored.
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
