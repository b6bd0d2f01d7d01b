"""Locates the next few thousand samples of a stream at once, without reading a byte.

    position -> (source, draw) -> sample -> its parts in a shard         blend, order, index

A part is one file of a sample: its document, then its media files. Vectorised, this costs a few
hundred nanoseconds per sample; one by one it would be twenty microseconds.
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
    """n samples in the order of the stream, and their p parts.

    Attributes:
        source: int16 [n] number of the source.
        sample: int64 [n] sample in the source's index.
        epoch: int64 [n] how often the source had been gone through before.
        part_ptr: int64 [n + 1] first part of each sample.
        slot: int64 [p] which of `shards` holds it.
        offset, length: int64 [p] its bytes in the shard.
        crc: uint32 [p] CRC-32 of those bytes.
        shards: the shards by first use.
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
    """The positions one rank holds of steps at `first`, `first + stride`, ...: int64 [steps, b].

    See `piece` for the part of a step that a rank holds.
    """
    begin, end = piece(batch_size, rank, world_size)
    return first + np.arange(steps)[:, None] * stride + np.arange(begin, end)


def piece(batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return (begin, end) of a rank's samples in a step of `batch_size`.

    The pieces are contiguous and equal but for one, so that those of all ranks, in rank order, are
    the same step for any number of ranks.
    """
    return rank * batch_size // world_size, (rank + 1) * batch_size // world_size


def locate(
    positions: NDArray[np.int64],
    indices: Sequence[SourceIndex],
    orders: Sequence[ShardOrder],
    segments: Sequence[Segment],
) -> Stretch:
    """Find samples and parts of positions [n]; the same for whoever asks, in whatever pieces.

    Args:
        positions: int64 [n] >= 0.
        indices, orders: one of each per source.
        segments: the blend of the sources.
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
        # The chunks of a video name one file; its first chunk stands for it.
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
        at = np.delete(parts, own[:-1])  # without the documents: the media
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
    """The keys of all samples of a stretch [n], from the sources' columns of keys."""
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
        # One source takes every draw: its table of a quarter of a million draws need not be made.
        return np.zeros(positions.size, np.int16), positions
    return blend(positions, segments)


@lru_cache(maxsize=64)
def _filling(index: SourceIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the redacted samples of a source, and those that stand in their places."""
    bad = np.unique(np.array(index.redacted, np.int64))
    if bad.size == index.num_samples:
        raise DataUsedUp(f"source {index.name!r}: all its samples were redacted; leave it out")
    return bad, substitutes(bad, index.shard_ptr)


def by_first_use(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number values [n] by first appearance: (number of each [n], the values by number)."""
    used, first, which = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    return rank[which], used[order]
