"""A source as the planner sees it: which sample a draw means, and how large it is.

A source is those samples of an index that `min_tokens` and `max_tokens` of `data.sources` choose;
its order is that of an index without the others. A *unit* is what a draw hands out: a sample, or
a part of one. What does not fit a row:

- a sample of text alone is split into parts of a row's length, units of their own;
- a sample with media that could fit is shrunk: its patch limits are lowered, by the same resize
  rule, until it does;
- anything else is refused. Its place in the order, and that of a sample in quarantine or with a
  tombstone, is filled
  by a usable unit of the same shard (of the source, if its whole shard is not usable): the k-th of
  a shard by the k-th after the next, in a circle. A rule that depends on nothing but the index, so
  that the order stays a function of position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from data_pipeline.augment.config import AugmentConfig
from data_pipeline.config import ChosenSource, DataConfig
from data_pipeline.index.columns import SourceIndex
from data_pipeline.plan.blend import SourceTotals
from data_pipeline.plan.layout import Layout, lay_out, num_levels
from data_pipeline.plan.order import ShardOrder
from data_pipeline.plan.variation import Variation

# Units whose mean stands for a source's under augmentation.
_PROBED = 1 << 16


class DataUsedUp(ValueError):
    """There is no sample to draw any more; the message says why and what to change."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """n units as they were drawn.

    Attributes:
        sample: int64 [n] sample in the source's index.
        part: int32 [n] which part of it, 0 for whole samples.
        epoch: int64 [n] how often the source had been gone through before.
        varied: bool [n] augmentation applies; off where its draw would not fit a row, or would
            leave none of the sample's regions in view.
        level: int16 [n] shrink level of its media.
        layout: sizes of the n units.
    """

    sample: NDArray[np.int64]
    part: NDArray[np.int32]
    epoch: NDArray[np.int64]
    varied: NDArray[np.bool_]
    level: NDArray[np.int16]
    layout: Layout


class Source:
    """One source: its index, the sizes of its samples, and its order of draws.

    Raises:
        ValueError: the source has no samples, none of the lengths that are chosen, or none that
            fits a row.
    """

    def __init__(self, index: SourceIndex, config: DataConfig):
        self.index = index
        self._seq_len, self._limits = config.seq_len, config.limits
        augment = config.augment.get(index.name, AugmentConfig())
        self.variation = Variation(index, augment, config.seed)
        samples = np.arange(index.num_samples)
        self.level = np.zeros(samples.size, np.int16)
        plain = lay_out(index, config.limits, samples, self.level)
        self.choice = config.chosen(index.name)
        self._chosen = choose(index.name, plain.length, self.choice)
        too_long = np.flatnonzero(self._chosen & (plain.length > config.seq_len))
        self.longest = int(plain.length[self._chosen].max(initial=0))
        if config.shrink_media and too_long.size:
            self._find_levels(too_long)
            plain = lay_out(index, config.limits, samples, self.level)
        parts = self._count_parts(plain) if config.split_text else np.ones(samples.size, np.int64)
        parts[~self._chosen] = 0
        self._layout = plain
        self._sample = np.repeat(samples, parts)
        self._part = np.arange(self._sample.size) - np.repeat(np.cumsum(parts) - parts, parts)
        self._split = parts > 1
        self._usable = self._chosen & ((plain.length <= config.seq_len) | self._split)
        if samples.size and not self._usable.any():
            shortest = plain.length[self._chosen].min()
            raise ValueError(
                f"source {index.name!r}: all {self._chosen.sum()} samples are longer than a row of "
                f"{config.seq_len} tokens (shortest {shortest}, longest "
                f"{self.longest}); raise seq_len, lower the patch limits, or split the samples"
            )
        self._shard = index.shard[self._sample]
        sizes = np.bincount(self._shard, minlength=len(index.shards))
        self.order = ShardOrder(sizes.tolist(), config.shard_window, config.seed, index.name)
        self._filling = lru_cache(maxsize=4)(self._fill)

    def _find_levels(self, too_long: NDArray[np.int64]) -> None:
        """Give each sample the lowest level at which it fits; those that never do keep 0."""
        left = too_long[np.diff(self.index.item_ptr)[too_long] > 0]
        for level in range(1, num_levels(self._limits) + 1):
            if not left.size:
                return
            levels = np.full(left.size, level)
            fits = lay_out(self.index, self._limits, left, levels).length <= self._seq_len
            self.level[left[fits]] = level
            left = left[~fits]

    def _count_parts(self, plain: Layout) -> NDArray[np.int64]:
        """Rows that each sample is split into: more than one only for plain text."""
        index = self.index
        simple = np.diff(index.item_ptr) + np.diff(index.region_ptr) + np.diff(index.variant_ptr)
        rows = -(-(plain.length - 2) // (self._seq_len - 2))
        return np.where((plain.length > self._seq_len) & (simple == 0), rows, 1)

    @property
    def counts(self) -> dict[str, int]:
        """How many samples were chosen, split, shrunk and refused, and into how many units."""
        return {
            "samples": self.index.num_samples,
            "chosen": int(self._chosen.sum()),
            "units": self._sample.size,
            "split": int(self._split.sum()),
            "shrunk": int((self.level > 0).sum()),
            "refused": int((self._chosen & ~self._usable).sum()),
            "longest": self.longest,
        }

    @property
    def notice(self) -> str | None:
        """Which samples are chosen and what rows of this length do to them, in one line.

        None: all are taken as they are. Splitting a text loses nothing and is not told.
        """
        refused = np.flatnonzero(self._chosen & ~self._usable)
        shrunk = int((self.level > 0).sum())
        told = []
        if self.choice is not None:
            told.append(f"{self._chosen.sum():,} are chosen by {self.choice.bounds}")
        if refused.size:
            first = self.index.key_of(int(refused[0]))
            told.append(
                f"{refused.size:,} are left out as longer than a row of data.seq_len="
                f"{self._seq_len} tokens (the first {first!r}, the longest {self.longest:,})"
            )
        if shrunk:
            told.append(f"the media of {shrunk:,} are shrunk to fit a row")
        whole = f"source {self.index.name!r}: of {self.index.num_samples:,} samples "
        return whole + " and ".join(told) if told else None

    @property
    def num_units(self) -> int:
        """Draws of one epoch."""
        return self._sample.size

    @property
    def totals(self) -> SourceTotals:
        """Draws, tokens and media tokens of one epoch, substitutes counted where they stand.

        Under augmentation the means are those of up to 65,536 units of the first epoch.
        """
        step = -(-self.num_units // _PROBED) if self.variation.active else 1
        units = np.arange(0, self.num_units, step)
        layout = self._measure(self._substituted(units, ()), np.zeros_like(units)).layout
        return SourceTotals(
            name=self.index.name,
            samples=units.size,
            tokens=int(layout.length.sum()),
            vision_tokens=int(layout.vision.sum()),
        )

    def is_split(self, sample: int) -> bool:
        """Whether a sample is handed out in parts."""
        return bool(self._split[sample])

    def draw(self, draws: NDArray[np.int64], quarantined: Sequence[int] = ()) -> Drawn:
        """Return the units of draw numbers [n], with the place of unusable samples filled.

        Args:
            draws: [n], all >= 0.
            quarantined: samples that turned out unusable, or have a tombstone.
        """
        units, epochs = self.order.samples(draws)
        return self._measure(self._substituted(units, tuple(quarantined)), epochs)

    def _substituted(
        self, units: NDArray[np.int64], quarantined: tuple[int, ...]
    ) -> NDArray[np.int64]:
        bad, filling = self._filling(quarantined)
        if not bad.size:
            return units
        at = np.minimum(np.searchsorted(bad, units), bad.size - 1)
        return np.where(bad[at] == units, filling[at], units)

    def _fill(self, quarantined: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        usable = self._usable.copy()
        usable[list(quarantined)] = False
        if not usable.any():
            raise DataUsedUp(
                f"source {self.index.name!r}: every sample that fits a row is in quarantine or "
                "has a tombstone; repair the source, or leave it out"
            )
        return substitutes(usable[self._sample], self._shard)

    def _measure(self, units: NDArray[np.int64], epochs: NDArray[np.int64]) -> Drawn:
        sample, part = self._sample[units], self._part[units]
        level = self.level[sample]
        layout = self._layout.of(sample)
        varied = np.zeros(sample.size, np.bool_)
        if self.variation.active:
            chance = self.variation.chance(sample, epochs)
            changes = self.variation.changes(sample, chance)
            layout = lay_out(self.index, self._limits, sample, level, changes)
            varied = (layout.length <= self._seq_len) & ~chance.lost & ~self._split[sample]
            if not varied.all():
                chance = self.variation.chance(sample, epochs, varied)
                changes = self.variation.changes(sample, chance)
                layout = lay_out(self.index, self._limits, sample, level, changes)
        split = np.flatnonzero(self._split[sample])
        if split.size:
            left = layout.length[split] - 2 - part[split] * (self._seq_len - 2)
            layout.length[split] = np.minimum(left + 2, self._seq_len)
        return Drawn(sample, part.astype(np.int32), epochs, varied, level, layout)


def choose(name: str, length: NDArray[np.int64], choice: ChosenSource | None) -> NDArray[np.bool_]:
    """Return which samples of lengths [n] a source takes, bool [n].

    Raises:
        ValueError: none of those that there are.
    """
    chosen = np.ones(length.size, np.bool_)
    if choice is None:
        return chosen
    if choice.min_tokens is not None:
        chosen &= length >= choice.min_tokens
    if choice.max_tokens is not None:
        chosen &= length <= choice.max_tokens
    if length.size and not chosen.any():
        raise ValueError(
            f"data.sources.{name}: none of its {length.size:,} samples is chosen by "
            f"{choice.bounds}: the longest has {length.max():,} tokens, the shortest "
            f"{length.min():,}; change the bounds, or give another source"
        )
    return chosen


def part_span(part: int, seq_len: int) -> slice:
    """Return which of a split sample's text tokens a part holds."""
    room = seq_len - 2
    return slice(part * room, (part + 1) * room)


def substitutes(
    usable: NDArray[np.bool_], shard: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (unusable units, the unit that fills each one's place), int64 [k] each.

    Args:
        usable: [units], at least one is.
        shard: [units], never decreasing.
    """
    bad, good = np.flatnonzero(~usable), np.flatnonzero(usable)
    if not bad.size:
        return bad, bad
    # The good ones of its shard, as a range of `good`; of the whole source if there is none.
    begin = np.searchsorted(good, np.searchsorted(shard, shard[bad]))
    end = np.searchsorted(good, np.searchsorted(shard, shard[bad], side="right"))
    lonely = begin == end
    begin, end = np.where(lonely, 0, begin), np.where(lonely, good.size, end)
    # The k-th bad one goes k further than the next good one: a run of bad ones is spread out.
    k = np.arange(bad.size) - np.searchsorted(shard[bad], shard[bad])
    return bad, good[begin + (np.searchsorted(good, bad) - begin + k) % (end - begin)]
