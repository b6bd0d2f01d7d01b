"""Maps the draws of a source to samples and their sizes.

A source consists of the samples of an index that `min_tokens` and `max_tokens` of `data.sources`
select. Its order is that of an index without the other samples. A *unit* is the result of a draw:
a sample or a part of a sample. Samples that do not fit a row are handled as follows:

- A text-only sample is split into parts of a row's length; each part is a unit.
- A sample with media is shrunk if that makes it fit: its patch limits are lowered, by the same
  resize rule, until it fits.
- Any other sample is refused. A usable unit of the same shard replaces a refused sample, and
  likewise a quarantined sample or a sample with a tombstone. If the whole shard is unusable, the
  unit comes from anywhere in the source. The k-th unusable unit of a shard is replaced by the k-th
  usable unit after the next one, cyclically. The rule depends only on the index, so the order
  stays a function of position.
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

_BLOCK = 1 << 15  # samples measured together

# Number of units whose mean estimates the mean of a source under augmentation.
_PROBED = 1 << 16


class DataUsedUp(ValueError):
    """No sample is left to draw; the message gives the reason and the remedy."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Result of n draws.

    Attributes:
        sample: int64 [n] sample in the source's index.
        part: int32 [n] part number of the sample; 0 for whole samples.
        epoch: int64 [n] number of completed epochs of the source.
        varied: bool [n] augmentation applies; False where the augmented sample would not fit a
            row, or would have none of its regions in view.
        level: int16 [n] shrink level of the sample's media.
        layout: sizes of the n units.
    """

    sample: NDArray[np.int64]
    part: NDArray[np.int32]
    epoch: NDArray[np.int64]
    varied: NDArray[np.bool_]
    level: NDArray[np.int16]
    layout: Layout


class _Units:
    """Numbering of a source's units; most samples are one unit, some are none or several.

    Args:
        samples: the samples that are not exactly one unit, ascending.
        parts: number of units of each of these samples, 0 or more.
        num_samples: samples of the source.
    """

    def __init__(self, samples: NDArray[np.int64], parts: NDArray[np.int64], num_samples: int):
        self.samples, self.parts = samples, parts
        self._more = np.concatenate([[0], np.cumsum(parts - 1)])
        self._first = samples + self._more[:-1]
        self.number = num_samples + int(self._more[-1])

    def of(self, units: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sample and the part number of each unit, int64 [n] each."""
        units = np.asarray(units, np.int64)
        after = np.searchsorted(self._first, units, side="right")
        sample, part = units - self._more[after], np.zeros_like(units)
        at = np.maximum(after - 1, 0)
        if len(self.samples):
            inside = (after > 0) & (units < self._first[at] + self.parts[at])
            sample = np.where(inside, self.samples[at], sample)
            part = np.where(inside, units - self._first[at], part)
        return sample, part

    def first(self, samples: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the first unit of each sample, int64 [n]; for no units, where it would be."""
        samples = np.asarray(samples, np.int64)
        return samples + self._more[np.searchsorted(self.samples, samples)]

    def all_of(self, samples: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the units of samples in ascending order, int64 [units]."""
        first, end = self.first(samples), self.first(samples + 1)
        own = np.concatenate([[0], np.cumsum(end - first)])
        return np.sort(np.repeat(first - own[:-1], end - first) + np.arange(own[-1]))


class Source:
    """One source: its index, the sizes of its samples, and its order of draws.

    In addition to the index, which processes may share, it stores only the unusual samples: not
    selected, too long, shrunk or split. Sizes are computed from the index when a sample is drawn.

    Raises:
        ValueError: the source has no samples, none within the length bounds, or none that fits a
            row.
    """

    def __init__(self, index: SourceIndex, config: DataConfig):
        self.index = index
        self._seq_len, self._limits = config.seq_len, config.limits
        augment = config.augment.get(index.name, AugmentConfig())
        self.variation = Variation(index, augment, config.seed)
        self.choice = config.chosen(index.name)
        found = _Lengths.of(index, config, self.choice)
        self.longest, self._left_out = found.longest, found.left_out
        shrunk = np.zeros(found.too_long.size, np.int64)
        if config.shrink_media and found.too_long.size:
            shrunk = self._levels_of(found.too_long)
        self._shrunk, self._level = found.too_long[shrunk > 0], shrunk[shrunk > 0]
        long, length = found.too_long[shrunk == 0], found.length[shrunk == 0]
        parts = np.ones(long.size, np.int64)
        if config.split_text:
            parts = np.where(self._is_plain(long), -(-(length - 2) // (self._seq_len - 2)), 1)
        self._refused = long[parts == 1]
        if index.num_samples and self._refused.size + self._left_out.size == index.num_samples:
            raise ValueError(
                f"source {index.name!r}: all {self._refused.size} samples are longer than a row of "
                f"{config.seq_len} tokens (shortest {found.shortest}, longest "
                f"{self.longest}); raise seq_len, lower the patch limits, or split the samples"
            )
        self._split = long[parts > 1]
        odd = np.concatenate([self._left_out, self._split])
        parts = np.concatenate([np.zeros(self._left_out.size, np.int64), parts[parts > 1]])
        order = np.argsort(odd)
        self._units = _Units(odd[order], parts[order], index.num_samples)
        self._shard_ptr = self._units.first(index.shard_ptr)  # first unit of each shard
        sizes = np.diff(self._shard_ptr).tolist()
        self.order = ShardOrder(sizes, config.shard_window, config.seed, index.name)
        self._filling = lru_cache(maxsize=4)(self._fill)

    def _levels_of(self, too_long: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lowest level at which each sample fits; 0 for samples that never fit."""
        found = np.zeros(too_long.size, np.int64)
        ptr = self.index.item_ptr
        left = np.flatnonzero(ptr[too_long + 1] > ptr[too_long])
        for level in range(1, num_levels(self._limits) + 1):
            if not left.size:
                break
            levels = np.full(left.size, level)
            laid_out = lay_out(self.index, self._limits, too_long[left], levels)
            fits = laid_out.length <= self._seq_len
            found[left[fits]] = level
            left = left[~fits]
        return found

    def _is_plain(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the mask of samples without media, regions and variants, bool [n]."""
        index = self.index
        more = np.zeros(samples.size, np.int64)
        for ptr in (index.item_ptr, index.region_ptr, index.variant_ptr):
            more += ptr[samples + 1] - ptr[samples]
        return more == 0

    def level_of(self, samples: NDArray[np.int64]) -> NDArray[np.int16]:
        """Return the shrink level of samples, int16 [n]."""
        found = np.zeros(samples.size, np.int16)
        shrunk = _in(samples, self._shrunk)
        found[shrunk] = self._level[np.searchsorted(self._shrunk, samples[shrunk])]
        return found

    @property
    def counts(self) -> dict[str, int]:
        """Counts of all, selected, split, shrunk and refused samples, and of units; the longest."""
        return {
            "samples": self.index.num_samples,
            "chosen": self._num_chosen,
            "units": self.num_units,
            "split": self._split.size,
            "shrunk": self._shrunk.size,
            "refused": self._refused.size,
            "longest": self.longest,
        }

    @property
    def notice(self) -> str | None:
        """Notice on selected, refused and shrunk samples, in one line.

        It is None if all samples are used as they are. Splitting a text loses nothing, so the
        notice does not mention it.
        """
        refused, shrunk = self._refused, self._shrunk.size
        told = []
        if self.choice is not None:
            told.append(f"{self._num_chosen:,} are chosen by {self.choice.bounds}")
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
        """Number of draws in one epoch."""
        return self._units.number

    @property
    def _num_chosen(self) -> int:
        return self.index.num_samples - self._left_out.size

    @property
    def totals(self) -> SourceTotals:
        """Draws, tokens and media tokens of one epoch, including substitutes.

        Under augmentation, they come from up to 65,536 units of the first epoch.
        """
        step = -(-self.num_units // _PROBED) if self.variation.active else 1
        samples = tokens = vision = 0
        for block in range(0, self.num_units, _BLOCK * step):
            units = np.arange(block, min(block + _BLOCK * step, self.num_units), step)
            layout = self._measure(self._substituted(units, ()), np.zeros_like(units)).layout
            samples += units.size
            tokens += int(layout.length.sum())
            vision += int(layout.vision.sum())
        return SourceTotals(self.index.name, samples, tokens, vision)

    def is_split(self, sample: int) -> bool:
        """Return whether a sample is split into parts."""
        return bool(_in(np.array([sample]), self._split)[0])

    def draw(self, draws: NDArray[np.int64], quarantined: Sequence[int] = ()) -> Drawn:
        """Return the units of draw numbers [n], with substitutes for unusable samples.

        Args:
            draws: [n], all >= 0.
            quarantined: samples that are in quarantine or have a tombstone.
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
        bad = np.union1d(self._refused, np.array(quarantined, np.int64))
        units = self._units.all_of(bad)
        if units.size == self.num_units:
            raise DataUsedUp(
                f"source {self.index.name!r}: every sample that fits a row is in quarantine or "
                "has a tombstone; repair the source, or leave it out"
            )
        return units, substitutes(units, self._shard_ptr)

    def in_epochs(self, samples: NDArray[np.int64], epochs: NDArray[np.int64]) -> Drawn:
        """Return samples [n] laid out as in epochs [n]; of a split sample, its first part.

        Raises:
            ValueError: a sample is longer than a row and is never drawn.
        """
        if refused := samples[_in(samples, self._refused)].tolist():
            raise ValueError(
                f"source {self.index.name!r}: sample {self.index.key_of(refused[0])!r} is longer "
                f"than a row of data.seq_len={self._seq_len} tokens, and is left out"
            )
        return self._laid_out(samples, np.zeros_like(samples), epochs)

    def _measure(self, units: NDArray[np.int64], epochs: NDArray[np.int64]) -> Drawn:
        return self._laid_out(*self._units.of(units), epochs)

    def _laid_out(
        self, sample: NDArray[np.int64], part: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> Drawn:
        level, is_split = self.level_of(sample), _in(sample, self._split)
        varied = np.zeros(sample.size, np.bool_)
        if not self.variation.active:
            layout = lay_out(self.index, self._limits, sample, level)
        else:
            chance = self.variation.chance(sample, epochs)
            changes = self.variation.changes(sample, chance)
            layout = lay_out(self.index, self._limits, sample, level, changes)
            varied = (layout.length <= self._seq_len) & ~chance.lost & ~is_split
            if not varied.all():
                chance = self.variation.chance(sample, epochs, varied)
                changes = self.variation.changes(sample, chance)
                layout = lay_out(self.index, self._limits, sample, level, changes)
        split = np.flatnonzero(is_split)
        if split.size:
            left = layout.length[split] - 2 - part[split] * (self._seq_len - 2)
            layout.length[split] = np.minimum(left + 2, self._seq_len)
        return Drawn(sample, part.astype(np.int32), epochs, varied, level, layout)


@dataclass(frozen=True, eq=False)
class _Lengths:
    """Samples of a source classified by length.

    Attributes:
        left_out: samples that are not selected, ascending, int64.
        too_long: selected samples longer than a row, ascending, int64.
        length: tokens of each sample in `too_long`, int64.
        shortest, longest: tokens of the shortest and longest selected sample; 0 without samples.
    """

    left_out: NDArray[np.int64]
    too_long: NDArray[np.int64]
    length: NDArray[np.int64]
    shortest: int
    longest: int

    @classmethod
    def of(cls, index: SourceIndex, config: DataConfig, choice: ChosenSource | None) -> "_Lengths":
        """Measure all samples in blocks.

        Raises:
            ValueError: the source has samples, but none is selected.
        """
        left_out, too_long, lengths = [], [], []
        of_all, of_chosen = list[int](), list[int]()
        for block in range(0, index.num_samples, _BLOCK):
            samples = np.arange(block, min(block + _BLOCK, index.num_samples))
            length = lay_out(index, config.limits, samples, np.zeros(samples.size, int)).length
            chosen = within(length, choice)
            long = chosen & (length > config.seq_len)
            left_out.append(samples[~chosen])
            too_long.append(samples[long])
            lengths.append(length[long])
            of_all += [int(length.min()), int(length.max())]
            if chosen.any():
                of_chosen += [int(length[chosen].min()), int(length[chosen].max())]
        if of_all and not of_chosen:
            raise _none_chosen(index.name, index.num_samples, choice, min(of_all), max(of_all))
        none = [np.zeros(0, np.int64)]
        return cls(
            np.concatenate(left_out or none),
            np.concatenate(too_long or none),
            np.concatenate(lengths or none),
            min(of_chosen, default=0),
            max(of_chosen, default=0),
        )


def choose(name: str, length: NDArray[np.int64], choice: ChosenSource | None) -> NDArray[np.bool_]:
    """Return the mask of lengths [n] that a source selects, bool [n].

    Raises:
        ValueError: there are samples, but none is selected.
    """
    chosen = within(length, choice)
    if length.size and not chosen.any():
        raise _none_chosen(name, length.size, choice, int(length.min()), int(length.max()))
    return chosen


def within(length: NDArray[np.int64], choice: ChosenSource | None) -> NDArray[np.bool_]:
    """Return the mask of lengths [n] within the bounds of a choice, bool [n]."""
    chosen = np.ones(length.size, np.bool_)
    if choice is not None and choice.min_tokens is not None:
        chosen &= length >= choice.min_tokens
    if choice is not None and choice.max_tokens is not None:
        chosen &= length <= choice.max_tokens
    return chosen


def _none_chosen(
    name: str, number: int, choice: ChosenSource | None, shortest: int, longest: int
) -> ValueError:
    assert choice is not None  # only a choice excludes samples
    return ValueError(
        f"data.sources.{name}: none of its {number:,} samples is chosen by {choice.bounds}: the "
        f"longest has {longest:,} tokens, the shortest {shortest:,}; change the bounds, or give "
        "another source"
    )


def _in(values: NDArray[np.int64], some: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the mask of values contained in `some`, which is ascending, bool [n]."""
    if not some.size:
        return np.zeros(values.size, np.bool_)
    return some[np.minimum(np.searchsorted(some, values), some.size - 1)] == values


def part_span(part: int, seq_len: int) -> slice:
    """Return the slice of a split sample's text tokens that a part holds."""
    room = seq_len - 2
    return slice(part * room, (part + 1) * room)


def substitutes(bad: NDArray[np.int64], shard_ptr: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the unit that replaces each unusable unit, int64 [k].

    Args:
        bad: the unusable units, ascending; at least one other unit must be usable.
        shard_ptr: first unit of each shard, and the total number of units, [shards + 1].
    """
    k, shift = np.arange(bad.size), bad - np.arange(bad.size)
    shard = np.searchsorted(shard_ptr, bad, side="right") - 1
    first, last = shard_ptr[shard], shard_ptr[shard + 1]

    def before(units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of usable units before each unit."""
        return units - np.searchsorted(bad, units)

    # Range of the shard's usable units among all usable units; the whole source if it has none.
    begin, end = before(first), before(last)
    lonely = begin == end
    begin, end = np.where(lonely, 0, begin), np.where(lonely, before(shard_ptr[-1:]), end)
    # The k-th bad unit skips k units after the next good one, which spreads a run of bad units.
    k = k - np.searchsorted(bad, first)
    good = begin + (before(bad) - begin + k) % (end - begin)
    return good + np.searchsorted(shift, good, side="right")
