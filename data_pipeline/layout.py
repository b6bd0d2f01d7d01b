"""How many tokens a sample takes and where its media stand, for every sample of a source at once.

A sample is [bos] segments [eos]; a media item is its prefix, one pad per embedding, and one closing
token. Sizes come from the index and `moonvit3d.geometry`, so no byte of data is read to know them.

A sample longer than a row cannot be used. Its place in the order is filled by the next usable
sample of the same shard, cyclically (of the source, if its whole shard is too long): a rule that
depends on nothing but the index, so that the order stays a function of position.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.blend import SourceTotals
from data_pipeline.index import SourceIndex
from data_pipeline.order import ShardOrder
from moonvit3d.geometry import PatchLimits, grids, num_tokens


@dataclass(frozen=True, eq=False)
class Layout:
    """Sizes of a source's N samples and M items.

    Attributes:
        length: int64 [N] tokens of each sample, bos and eos included.
        vision: int64 [N] media-pad tokens of each sample.
        tokens: int32 [M] media-pad tokens of each item.
        start: int64 [M] first media-pad token of the item, counted from its sample's bos.
        grid: int32 [M, 3] frames, rows and columns of patches.
    """

    length: NDArray[np.int64]
    vision: NDArray[np.int64]
    tokens: NDArray[np.int32]
    start: NDArray[np.int64]
    grid: NDArray[np.int32]


def layout(index: SourceIndex, limits: PatchLimits) -> Layout:
    """Compute the layout of every sample and item of an index under the given limits."""
    grid = grids(
        index.item_kind, index.item_frames, index.item_height, index.item_width, limits
    ).reshape(-1, 3)
    tokens = np.asarray(num_tokens(grid[:, 0], grid[:, 1], grid[:, 2]), np.int64)
    prefix = index.item_prefix.astype(np.int64)
    # Running sums over all items of the source; a sample's own sums are differences of them.
    taken = np.concatenate([[0], np.cumsum(prefix + tokens + 1)])
    seen = np.concatenate([[0], np.cumsum(tokens)])
    first, end = index.item_ptr[:-1], index.item_ptr[1:]
    before = taken[:-1] - np.repeat(taken[first], end - first)
    return Layout(
        length=2 + index.text_tokens.astype(np.int64) + taken[end] - taken[first],
        vision=seen[end] - seen[first],
        tokens=tokens.astype(np.int32),
        start=1 + index.item_text_before.astype(np.int64) + before + prefix,
        grid=grid.astype(np.int32),
    )


def substitutes(
    length: NDArray[np.int64], shard: NDArray[np.integer], seq_len: int, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (too-long samples, the sample that fills each one's place), int64 [k] each.

    Raises:
        ValueError: every sample of the source is longer than a row.
    """
    bad = np.flatnonzero(length > seq_len)
    if not bad.size:
        return bad, bad
    good = np.flatnonzero(length <= seq_len)
    if not good.size:
        raise ValueError(
            f"source {name!r}: all {length.size} samples are longer than a row of {seq_len} "
            f"tokens (shortest {length.min()}, longest {length.max()}); raise seq_len, lower the "
            "patch limits, or split the samples"
        )
    following = np.searchsorted(good, bad)
    shard_first, shard_end = (
        np.searchsorted(shard, shard[bad]),
        np.searchsorted(shard, shard[bad], side="right"),
    )
    first_good = np.searchsorted(good, shard_first)
    after = good[following % good.size]
    inside = (following < good.size) & (after < shard_end)
    wrapped = good[first_good % good.size]
    has_good = (first_good < good.size) & (wrapped < shard_end)
    return bad, np.where(inside, after, np.where(has_good, wrapped, after))


class Source:
    """One source as the planner sees it: its index, its layout, and its order of draws.

    Raises:
        ValueError: the source has no samples, or none that fits a row.
    """

    def __init__(
        self, index: SourceIndex, limits: PatchLimits, seq_len: int, shard_window: int, seed: int
    ):
        sizes = np.bincount(index.shard, minlength=len(index.shards))
        self.index = index
        self.layout = layout(index, limits)
        self.order = ShardOrder(sizes.tolist(), shard_window, seed, index.name)
        self.too_long, self.filling = substitutes(
            self.layout.length, index.shard, seq_len, index.name
        )

    @property
    def totals(self) -> SourceTotals:
        """Draws, tokens and media tokens of one epoch, substitutes counted where they stand."""
        used = np.arange(self.layout.length.size)
        used[self.too_long] = self.filling
        return SourceTotals(
            name=self.index.name,
            samples=used.size,
            tokens=int(self.layout.length[used].sum()),
            vision_tokens=int(self.layout.vision[used].sum()),
        )

    def samples(self, draws: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (sample index, epoch), int64 [n] each, of draw numbers [n]."""
        index, epoch = self.order.samples(draws)
        if self.too_long.size:
            at = np.minimum(np.searchsorted(self.too_long, index), self.too_long.size - 1)
            index = np.where(self.too_long[at] == index, self.filling[at], index)
        return index, epoch
