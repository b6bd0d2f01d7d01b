"""Locates the next few thousand samples of a stream at once, without reading data.

    position -> (source, draw) -> sample -> its parts in a shard         blend, order, index

A part is one file of a sample: its document or one of its media files. The vectorised lookup takes
a few hundred nanoseconds per sample; a lookup per sample would take twenty microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.index.columns import ShardInfo, SourceIndex
from data_pipeline.plan.blend import Segment, blend
from data_pipeline.plan.csr import gather_rows, row_sums
from data_pipeline.plan.order import ShardOrder
from data_pipeline.plan.source import DataUsedUp, substitutes


@dataclass(frozen=True, eq=False)
class Stretch:
    """n samples in stream order, with their p parts.

    Attributes:
        source: int16 [n] number of the source.
        sample: int64 [n] sample in the source's index.
        epoch: int64 [n] number of completed epochs of the source.
        part_ptr: int64 [n + 1] first part of each sample, and the end.
        slot: int64 [p] index in `shards` of the part's shard.
        offset, length: int64 [p] byte range of the part in the shard.
        crc: uint32 [p] CRC-32 of those bytes.
        shards: shards in order of first use.
    """

    source: NDArray[np.int16]
    sample: NDArray[np.int64]
    epoch: NDArray[np.int64]
    part_ptr: NDArray[np.int64]
    slot: NDArray[np.int64]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    crc: NDArray[np.uint32]
    shards: Sequence[ShardInfo]


def positions_of(
    first: int, steps: int, stride: int, batch_size: int, rank: int, world_size: int
) -> NDArray[np.int64]:
    """Return one rank's positions in the steps at `first`, `first + stride`, ..., int64 [steps, b].

    See `piece` for a rank's part of a step.
    """
    begin, end = piece(batch_size, rank, world_size)
    return first + np.arange(steps)[:, None] * stride + np.arange(begin, end)


def piece(batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return (begin, end) of a rank's samples in a step of `batch_size`.

    The pieces are contiguous, and their sizes differ by at most one. In rank order, they form the
    same step for any number of ranks.
    """
    return rank * batch_size // world_size, (rank + 1) * batch_size // world_size


def locate(
    positions: NDArray[np.int64],
    indices: Sequence[SourceIndex],
    orders: Sequence[ShardOrder],
    segments: Sequence[Segment],
) -> Stretch:
    """Return samples and parts of positions [n]; the result does not depend on the grouping.

    Args:
        positions: int64 [n] >= 0.
        indices, orders: one index and one order per source.
        segments: blend of the sources.
    """
    source, draw = _draws(positions, segments)
    sample, epoch = np.empty(source.size, np.int64), np.empty(source.size, np.int64)
    shard, files = np.empty(source.size, np.int64), np.empty(source.size, np.int64)
    first_shard = np.cumsum([0, *(len(index.shards) for index in indices)])
    found: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for number, (index, order) in enumerate(zip(indices, orders)):
        chosen = np.flatnonzero(source == number)
        picked, epoch[chosen] = order.samples(draw[chosen]) if chosen.size else (chosen, 0)
        if index.redacted:
            bad, filling = _filling(index)
            at = np.minimum(np.searchsorted(bad, picked), bad.size - 1)
            picked = np.where(bad[at] == picked, filling[at], picked)
        sample[chosen] = picked
        shard[chosen] = first_shard[number] + index.shard[picked]
        items, own = gather_rows(index.item_ptr, picked)
        # All chunks of a video share one file, so only the first chunk counts.
        is_file = index.item_chunk[items] == 0
        files[chosen] = row_sums(is_file, own)
        found.append((chosen, items[is_file]))
    part_ptr = np.concatenate([[0], np.cumsum(files + 1)])
    offset, length = np.empty(part_ptr[-1], np.int64), np.empty(part_ptr[-1], np.int64)
    crc = np.empty(part_ptr[-1], np.uint32)
    for index, (chosen, items) in zip(indices, found):
        at, picked = part_ptr[chosen], sample[chosen]
        offset[at], length[at] = index.json_offset[picked], index.json_length[picked]
        crc[at] = index.json_crc[picked]
        parts, own = gather_rows(part_ptr, chosen)
        at = np.delete(parts, own[:-1])  # remove the documents, which leaves the media
        crc[at] = index.item_crc[items]
        offset[at], length[at] = index.item_offset[items], index.item_length[items]
    slot, used = by_first_use(shard)
    shards = [info for index in indices for info in index.shards]
    return Stretch(
        source=source,
        sample=sample,
        epoch=epoch,
        part_ptr=part_ptr,
        slot=np.repeat(slot, files + 1),
        offset=offset,
        length=length,
        crc=crc,
        shards=[shards[number] for number in used.tolist()],
    )


def keys_of(stretch: Stretch, columns: Sequence[pa.Array]) -> list[str]:
    """Return the keys of all samples of a stretch [n] from the sources' key columns."""
    keys = np.empty(stretch.sample.size, object)
    for number, column in enumerate(columns):
        chosen = np.flatnonzero(stretch.source == number)
        taken = column.take(pa.array(stretch.sample[chosen]))
        keys[chosen] = taken.to_numpy(zero_copy_only=False)
    return keys.tolist()


def _draws(
    positions: NDArray[np.int64], segments: Sequence[Segment]
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    if all(len(segment.weights) == 1 for segment in segments):
        # With one source, every draw is its own, so the blend's large table is not needed.
        return np.zeros(positions.size, np.int16), positions
    return blend(positions, segments)


@lru_cache(maxsize=64)
def _filling(index: SourceIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the redacted samples of a source, and their substitutes."""
    bad = np.unique(np.array(index.redacted, np.int64))
    if bad.size == index.num_samples:
        raise DataUsedUp(f"source {index.name!r}: all its samples were redacted; leave it out")
    return bad, substitutes(bad, index.shard_ptr)


def by_first_use(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number values by first appearance; return the number of each [n], and the unique values."""
    used, first, which = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    return rank[which], used[order]
