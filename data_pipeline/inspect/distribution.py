"""Distributions stored as value counts: percentiles, heavy tails, drift. Pure functions.

Value counts can be added over sources, take memory only per distinct value, and give the same
results as the values themselves: `inspect.stats.spread` is the reference for `spread_of`.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data_pipeline.inspect.stats import PERCENTILES, binned

TAILS = (0.001, 0.01, 0.1)
"""Shares of the largest values whose part of the sum `tail` reports."""

# Added to each bin of a PSI; a bin that is empty on one side only would make it infinite.
_PSEUDO_COUNT = 0.5


class ValueCounts(NamedTuple):
    """Counts of integers: values int64 [v], ascending and unique; counts int64 [v]."""

    values: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def total(self) -> int:
        """Total number of integers."""
        return int(self.counts.sum())


def counted(values: ArrayLike) -> ValueCounts:
    """Count integers [n]."""
    found, counts = np.unique(np.asarray(values, np.int64), return_counts=True)
    return ValueCounts(found, counts)


def merged(parts: Iterable[ValueCounts]) -> ValueCounts:
    """Return the sum of several value counts."""
    found = list(parts)
    values = np.concatenate([np.zeros(0, np.int64), *(part.values for part in found)])
    counts = np.concatenate([np.zeros(0, np.int64), *(part.counts for part in found)])
    whole, place = np.unique(values, return_inverse=True)
    sums = np.bincount(place, weights=counts, minlength=whole.size)
    return ValueCounts(whole, sums.astype(np.int64))


def spread_of(
    found: ValueCounts, bins_per_octave: int | None = None, unit: float = 1
) -> dict[str, Any]:
    """Return `stats.spread` of the values divided by `unit`."""
    total = found.total
    if not total:
        return {"count": 0}
    values, last = found.values / unit, np.cumsum(found.counts)
    place = (total - 1) * (np.array(PERCENTILES) / 100)
    below = np.floor(place)
    low, high = (
        values[np.searchsorted(last, np.minimum(at, total - 1), side="right")]
        for at in (below, below + 1)
    )
    # Interpolate from the nearer side, as numpy does, so that both ends are exact.
    part, step = place - below, high - low
    at = np.where(part < 0.5, low + step * part, high - step * (1 - part)).tolist()
    spread: dict[str, Any] = {
        "count": total,
        "mean": weighted_sum(found) / unit / total,
        "min": float(values[0]),
        **{f"p{percent}": value for percent, value in zip(PERCENTILES, at, strict=True)},
        "max": float(values[-1]),
    }
    if bins_per_octave is not None:
        spread["histogram"] = binned(values, found.counts, bins_per_octave)
    return spread


def weighted_sum(found: ValueCounts) -> int:
    """Return the sum of all values, exactly."""
    return int((found.values * found.counts).sum())


def tail(found: ValueCounts) -> dict[str, Any]:
    """Return how much of the sum the largest values hold.

    Returns:
        count, sum; largest: for each share of `TAILS` {share, count (rounded up), sum, part (of the
        sum)}; half: {count, share} of the fewest values that hold half of the sum. If there are no
        values, or all are 0, only count and sum.
    """
    total, whole = found.total, weighted_sum(found)
    if not whole:
        return {"count": total, "sum": whole}
    values, counts = found.values[::-1], found.counts[::-1]
    number, sums = np.cumsum(counts), np.cumsum(values * counts)

    def sum_of(count: int) -> int:
        at = int(np.searchsorted(number, count))
        return int(sums[at] - (number[at] - count) * values[at])

    # Find the value at which half of the sum is reached, and how many copies of it are needed.
    at = int(np.searchsorted(2 * sums, whole))
    short = whole - 2 * int(sums[at] - values[at] * counts[at])
    half = int(number[at] - counts[at]) + -(-short // (2 * int(values[at])))
    largest = []
    for share in TAILS:
        count = math.ceil(share * total)
        part = sum_of(count)
        largest.append({"share": share, "count": count, "sum": part, "part": part / whole})
    return {
        "count": total,
        "sum": whole,
        "largest": largest,
        "half": {"count": half, "share": half / total},
    }


def drift(one: ValueCounts, other: ValueCounts, bins_per_octave: int) -> dict[str, float] | None:
    """Return the drift between two distributions; None if one of them is empty.

    Returns:
        psi: population stability index over the bins of `stats.histogram` and a bin for zeros, with
        half a count added to each; by convention, below 0.1 is no drift and above 0.25 is a large
        drift. distance: Kolmogorov-Smirnov statistic, the largest difference between the two
        cumulative distributions, from 0 to 1.
    """
    if not one.total or not other.total:
        return None
    values = np.union1d(one.values, other.values)
    shares = []
    for part in (one, other):
        counts = np.zeros(values.size, np.int64)
        counts[np.searchsorted(values, part.values)] = part.counts
        shares.append(counts)
    places = np.floor(np.log2(np.maximum(values, 1)) * bins_per_octave)
    places = np.where(values > 0, places, -1)
    _, place = np.unique(places, return_inverse=True)
    bins = [np.bincount(place, weights=counts) for counts in shares]
    running = [np.cumsum(counts) / counts.sum() for counts in shares]
    distance = float(np.abs(running[0] - running[1]).max())
    return {"psi": psi(*bins), "distance": distance}


def psi(one: ArrayLike, other: ArrayLike) -> float:
    """Return the population stability index of counts [b] in the same bins."""
    counts = [np.asarray(part, np.float64) + _PSEUDO_COUNT for part in (one, other)]
    a, b = (part / part.sum() for part in counts)
    return float(((a - b) * np.log(a / b)).sum())
