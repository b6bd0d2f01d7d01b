"""Maps the draws of a source to samples by a keyed permutation that is computed, not stored.

Draw k of a source of N samples is in epoch k // N at index k % N. Inside an epoch the order has two
levels, because one flat shuffle would need a separate small request for every sample:

1. The shards are permuted.
2. `shard_window` neighbours in that order form a shard window, and its samples are permuted among
   themselves. A larger window shuffles better, a smaller one reads longer ranges.

Both levels use the same function, `permute`: a Feistel network over the smallest power of two that
covers the domain, repeated while the result lies outside (cycle walking; Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). Random access takes constant time. The only table
has one row per shard and epoch, because shards hold different numbers of samples.

Keys come from blake2b over (seed, purpose, source, epoch). There is no global generator, so the
order does not depend on the caller or on earlier calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data_pipeline.keyed import GOLDEN, keyed, mix

# Each round changes both halves; four rounds suffice even for domains of a few samples.
ROUNDS = 4


def permute(index: ArrayLike, size: ArrayLike, key: ArrayLike) -> NDArray[np.int64]:
    """Map each index of 0..size-1 to its image under the permutation named by (size, key).

    Args:
        index: integers of any shape, each in 0..size-1.
        size: number of elements of the permutation, at most 2**62; broadcasts against `index`.
        key: uint64 key; broadcasts against `index`.

    Returns:
        int64, the broadcast shape of the arguments.

    Raises:
        ValueError: an index lies outside its permutation.
    """
    places, sizes, keys = np.broadcast_arrays(
        np.asarray(index, np.int64), np.asarray(size, np.int64), np.asarray(key, np.uint64)
    )
    shape = places.shape
    places, sizes, keys = places.ravel(), sizes.ravel(), keys.ravel()
    wrong = (places < 0) | (places >= sizes)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(f"index {places[at]} is outside a permutation of {sizes[at]} elements")
    bits = _bit_length(sizes - 1)
    values = _feistel(places.astype(np.uint64), bits, keys)
    limits = sizes.astype(np.uint64)
    outside = np.flatnonzero(values >= limits)
    while outside.size:  # less than half of the power of two lies outside, so this ends soon
        values[outside] = _feistel(values[outside], bits[outside], keys[outside])
        outside = outside[values[outside] >= limits[outside]]
    return values.astype(np.int64).reshape(shape)


def _bit_length(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    bits = np.zeros(values.shape, np.uint64)
    rest = values.astype(np.uint64)
    for step in (32, 16, 8, 4, 2, 1):
        shift = np.where(rest >> np.uint64(step) > 0, np.uint64(step), np.uint64(0))
        bits += shift
        rest = rest >> shift
    return bits + rest


def _feistel(
    values: NDArray[np.uint64], bits: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    one = np.uint64(1)
    low_bits = bits - bits // np.uint64(2)
    low_mask = (one << low_bits) - one
    high_mask = (one << (bits - low_bits)) - one
    high, low = values >> low_bits, values & low_mask
    for _ in range(ROUNDS):
        keys = keys + GOLDEN
        high = high ^ (mix(low + keys) & high_mask)
        keys = keys + GOLDEN
        low = low ^ (mix(high + keys) & low_mask)
    return (high << low_bits) | low


@dataclass(frozen=True)
class _Epochs:
    """Concatenated shard tables of E epochs (the e-th starts at index e * samples)."""

    epochs: NDArray[np.int64]  # [E] epoch numbers, ascending
    keys: NDArray[np.uint64]  # [E]
    shards: NDArray[np.int64]  # [E * shards] shard at each index of the shard order
    starts: NDArray[np.int64]  # [E * shards] first index of that shard
    shard_windows: NDArray[np.int64]  # [E * shard windows + 1] first index of each, and the end
    shard_windows_per_epoch: int


class ShardOrder:
    """Order of one source; maps draw numbers to sample indices.

    Args:
        shard_sizes: samples in each shard; sample indices follow the order of the shards.
        shard_window: number of neighbouring shards, in permuted order, shuffled together.
        seed: data seed of the run.
        source: name of the source; part of every key.

    Raises:
        ValueError: the source has no samples, or the window is below one shard.
    """

    def __init__(self, shard_sizes: Sequence[int], shard_window: int, seed: int, source: str):
        self.sizes = np.asarray(shard_sizes, np.int64)
        self.num_samples = int(self.sizes.sum())
        if self.num_samples < 1 or (self.sizes < 0).any():
            raise ValueError(f"source {source!r} holds {self.num_samples} samples; need 1 or more")
        if shard_window < 1:
            raise ValueError(f"shard_window is {shard_window}; it counts shards, 1 or more")
        self.shard_window = shard_window
        self.seed = seed
        self.source = source
        self._first = np.cumsum(self.sizes) - self.sizes
        self._recent: _Epochs | None = None  # consecutive windows mostly need the same epoch

    def samples(self, draws: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return sample index and epoch, int64 [n] each, of draw numbers [n], all >= 0."""
        draw_numbers = np.asarray(draws, np.int64).ravel()
        epoch, place = np.divmod(draw_numbers, self.num_samples)
        if epoch.size and epoch.min() < 0:
            raise ValueError(f"draw {draw_numbers.min()} of source {self.source!r} is negative")
        epochs, which = np.unique(epoch, return_inverse=True)
        table = self._tables(epochs)
        flat = which * self.num_samples + place
        window = np.searchsorted(table.shard_windows, flat, side="right") - 1
        start = table.shard_windows[window]
        size = table.shard_windows[window + 1] - start
        key = mix(table.keys[which] ^ (window % table.shard_windows_per_epoch).astype(np.uint64))
        flat = start + permute(flat - start, size, key)
        # side="right" skips empty shards: of equal starts, the last one holds the samples
        slot = np.searchsorted(table.starts, flat, side="right") - 1
        return self._first[table.shards[slot]] + flat - table.starts[slot], epoch

    def _tables(self, epochs: NDArray[np.int64]) -> _Epochs:
        recent = self._recent
        if recent is not None and np.array_equal(recent.epochs, epochs):
            return recent
        num_shards = self.sizes.size
        keys = np.array(
            [keyed(self.seed, "order", self.source, int(e)) for e in epochs], dtype=np.uint64
        )
        shards = permute(np.arange(num_shards)[None, :], num_shards, keys[:, None])
        sizes = self.sizes[shards]
        offset = np.arange(epochs.size)[:, None] * self.num_samples
        starts = np.cumsum(sizes, axis=1) - sizes + offset
        shard_windows = starts[:, :: self.shard_window]
        # Two threads may plan at once: return this call's table, even if another replaces it.
        self._recent = recent = _Epochs(
            epochs=epochs,
            keys=keys,
            shards=shards.ravel(),
            starts=starts.ravel(),
            shard_windows=np.append(shard_windows.ravel(), epochs.size * self.num_samples),
            shard_windows_per_epoch=shard_windows.shape[1],
        )
        return recent
