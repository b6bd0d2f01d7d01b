"""Synthetic media items with the size distribution of a real mix, and lower bounds on makespan.

The mix has 703 documents (captions, pages, screens, charts, videos), each of which counts as one
item here. Language-model tokens: p50 415, p90 4,641, p99 10,549, maximum 18,849. The largest tenth
holds 56% of all tokens. Sizes between these quantiles are interpolated on a log scale; the value at
80% is chosen to match the 56%.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

QUANTILES = {0.0: 16, 0.5: 415, 0.8: 1_600, 0.9: 4_641, 0.99: 10_549, 1.0: 18_849}  # tokens
LARGEST = 4_096  # tokens; follows from the patch limit of a page
PATCHES_PER_TOKEN = 4
PIGEONS = 64


def heavy_tailed_tokens(items: int, seed: int, largest: int = LARGEST) -> Ints:
    """Return the token counts of synthetic items, int64 [items]."""
    draws = np.random.Generator(np.random.Philox(key=seed)).random(items)
    logs = np.interp(draws, list(QUANTILES), np.log(list(QUANTILES.values())))
    return np.minimum(np.exp(logs).astype(np.int64), largest)


def simple_bound(costs: Floats, num_ranks: int) -> float:
    """Return max(mean load, largest item)."""
    return max(float(costs.sum()) / num_ranks, float(costs.max(initial=0.0)))


def certified_bound(costs: Floats, num_ranks: int) -> float:
    """Return a lower bound on the makespan of every assignment, at least the simple bound.

    Two arguments give the bound. Pigeonhole: of the k * ranks + 1 largest items, k + 1 share a
    rank. Bin packing: bisection finds the largest capacity for which the items need more bins than
    there are ranks (bound L2 of Martello and Toth, 1990).
    """
    falling = np.sort(costs)[::-1]
    low = simple_bound(costs, num_ranks)
    for k in range(1, min(PIGEONS, (len(falling) - 1) // num_ranks) + 1):
        last = k * num_ranks + 1
        low = max(low, float(falling[last - k - 1 : last].sum()))
    high = 2 * low
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if bins_needed(falling, middle) > num_ranks else (low, middle)
    return low


def bins_needed(falling: Floats, capacity: float) -> int:
    """Return a lower bound on the number of bins of the given capacity that the items need.

    The bound holds for every size p. An item larger than capacity - p cannot share a bin with an
    item of size p or more. Every other item larger than half the capacity occupies one bin; the
    space left in these bins can take items of size p up to half.
    """
    rising, total = falling[::-1], np.concatenate([[0.0], np.cumsum(falling)])

    def above(size: Floats | float, side: str) -> Ints:
        return len(rising) - np.searchsorted(rising, size, side)

    half = int(above(capacity / 2, "right"))
    sizes = np.unique(np.append(falling[half:], 0.0))
    alone = above(capacity - sizes, "right")
    room = (half - alone) * capacity - (total[half] - total[alone])
    small = total[above(sizes, "left")] - total[half]
    more = np.ceil((small - room) / capacity - 1e-9)
    return half + max(0, int(more.max()))
