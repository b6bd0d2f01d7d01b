"""Assigns the media items of the whole global batch to ranks. Pure function of metadata.

Terms: *work* is an item's seconds as an integer. *home* is the rank that needs the item. *base* is
the fixed work of a rank (its parts of split items), and its *load* is base plus assigned work.
*levels* group ranks from near to far: replica on one node, replica, node, all. `place` first makes
the slowest rank as fast as it can, then reduces the traffic of embeddings:

    blocks   items of several parts (`choose_splits`) go to blocks of 2 to 16 ranks: `split`
    bound    a lower bound on the slowest load: the mean, the largest item, or two large items on
             one rank; if the mean is far below it, large items decide: try `stay` at the bound
    balance  LPT (Graham, 1969): most expensive first, to the least-loaded rank. If the result is
             not near the bound, pack items under the smallest feasible capacity, then let ranks
             swap items: `makespan`. Its slowest load is the limit for the steps below
    stay     all items start at home; if a home exceeds the limit, its most expensive items move to
             the least-loaded rank with capacity in the nearest group: `nearby`. Tried with larger
             and larger pools of the smallest items, which LPT assigns last, then swaps, until no
             load exceeds the limit
    else     take the balanced assignment and reduce its traffic at equal loads: ranks exchange all
             their work (`rename`), items of equal work trade ranks (`trade`)

Every rank computes the same assignment from metadata, without communication (phase 0).
`longest_processing_time` and `round_robin` are simple baselines.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.dep.makespan import (
    FEW,
    SMALL,
    balance,
    in_units,
    least_makespan,
    lpt,
    summed,
    swaps,
)
from kimi_pretrain.dep.nearby import rename, stay, trade
from kimi_pretrain.dep.places import Moved, Placement, Places, loads, moved, seconds_of_part
from kimi_pretrain.dep.split import choose_splits, place_blocks

__all__ = [
    "Moved",
    "Placement",
    "Places",
    "choose_splits",
    "load_per_rank",
    "loads",
    "longest_processing_time",
    "max_over_mean",
    "moved",
    "place",
    "round_robin",
]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SLACK = 5  # if the mean is below the bound by over 2**-5, large items decide: try `stay` first
# Pools of the smallest items, tried in turn: 2**-n of all work is assigned last; 62: no pool.
POOLS = (62, 8, 7, 6, 5, 4, 3)
ATTEMPTED = 49_152  # items x attempts, but at least 3 attempts (2 or 0 if large items were packed)


def place(costs: Floats, parts: Ints, home: Ints, places: Places, efficiency: float) -> Placement:
    """Assign every item to a rank, or to a block of ranks; see `Placement`.

    The slowest rank is as fast as the search can make it, and never slower than longest processing
    time next to the same blocks. Among such placements, items stay near the ranks that need them:
    on the rank itself, in its replica, or on its node.

    Args:
        costs: seconds of each item on one rank, float64 [items].
        parts: number of ranks that share each item, from `choose_splits`, int64 [items].
        home: rank that needs each item, int64 [items].
        efficiency: fraction of their speed that ranks keep when they share an item, in (0, 1].

    Raises:
        ValueError: an invalid cost, home or number of parts, or no block for a split item.
    """
    _check(costs, parts, home, places, efficiency)
    work, _ = in_units(seconds_of_part(costs, parts, efficiency), parts, places.num_ranks)
    rank, base = place_blocks(work, parts, places, home)
    whole = parts == 1
    rank[whole] = _place_whole(work[whole], home[whole], base, places)
    return Placement(rank, parts.astype(np.int64))


def _place_whole(work: Ints, home: Ints, base: Ints, places: Places) -> Ints:
    """Return the rank of each whole item, on top of the base work from blocks."""
    levels, bound = places.levels(), least_makespan(work, base)
    if int(work.sum() + base.sum()) // len(base) <= bound - (bound >> SLACK):
        # The largest item sets the bound, so balancing is not needed.
        ranks = stay(work, home, base, bound, levels)
        if int(summed(work, ranks, base).max()) <= bound:
            return ranks
    balanced, packed = balance(work, base)
    limit = int(summed(work, balanced, base).max())
    attempts = _attempts(work, home, base, limit, levels, balanced if packed else None)
    for attempt in attempts:
        ranks = swaps(attempt, work, base, limit)
        if int(summed(work, ranks, base).max()) <= limit:
            return ranks
    return _nearer(balanced, work, home, base, levels)


def _attempts(
    work: Ints, home: Ints, base: Ints, limit: int, levels: list[Ints], packed: Ints | None
) -> Iterator[Ints]:
    """Yield assignments with little traffic that may meet the limit; see `_place_whole`.

    Args:
        packed: the balanced assignment if it had to pack large items tightly, else None. If given,
            the first kind of attempt, which ignores the packing, seldom succeeds.
    """
    tries = max(3, ATTEMPTED // max(1, len(work)))
    if packed is not None:
        tries = 2 if len(work) <= FEW else 0
    for pool in POOLS[:tries]:
        yield _stay_but_small(work, home, base, limit, levels, pool)
    if packed is not None:
        yield _stay_beside_large(work, home, base, limit, levels, packed)


def _nearer(ranks: Ints, work: Ints, home: Ints, base: Ints, levels: list[Ints]) -> Ints:
    """Return an assignment with the same loads and with items nearer to their homes."""
    alike = np.flatnonzero(base == base.min())  # ranks that can exchange their work
    return trade(rename(ranks, work, home, alike, levels), work, home, levels)


def _stay_but_small(
    work: Ints, home: Ints, base: Ints, limit: int, levels: list[Ints], pool: int
) -> Ints:
    """Return ranks from `stay`; a pool of the smallest items is assigned last to even out loads."""
    order = np.argsort(work, kind="stable")
    size = int(np.searchsorted(np.cumsum(work[order]), int(work.sum()) >> pool))
    small, kept = order[:size], np.sort(order[size:])
    margin = int(work[small].sum()) // (2 * len(base))
    ranks = np.empty(len(work), dtype=np.int64)
    ranks[kept] = stay(work[kept], home[kept], base, limit - margin, levels)
    ranks[small] = lpt(work[small], summed(work[kept], ranks[kept], base))
    return ranks


def _stay_beside_large(
    work: Ints, home: Ints, base: Ints, limit: int, levels: list[Ints], packed: Ints
) -> Ints:
    """Return ranks that keep the packing of large items and leave small items near their homes."""
    large, small = work > limit >> SMALL, work <= limit >> SMALL
    ranks = packed.copy()
    ranks[large] = _nearer(packed[large], work[large], home[large], base, levels)
    beside = summed(work[large], ranks[large], base)
    ranks[small] = stay(work[small], home[small], beside, limit, levels)
    return ranks


def _check(costs: Floats, parts: Ints, home: Ints, places: Places, efficiency: float) -> None:
    if not len(costs) == len(parts) == len(home):
        raise ValueError(
            f"place: {len(costs)} costs, {len(parts)} parts and {len(home)} homes; "
            "expected one of each per item"
        )
    if not 0 < efficiency <= 1:
        raise ValueError(f"place: efficiency {efficiency} must be above 0 and at most 1")
    for name, values, wrong, expected in (
        ("cost", costs, ~(np.isfinite(costs) & (costs >= 0)), "finite seconds, 0 or more"),
        ("parts", parts, ~np.isin(parts, (1, 2, 4, 8, 16)), "1, 2, 4, 8 or 16"),
        ("home", home, (home < 0) | (home >= places.num_ranks), f"0 to {places.num_ranks - 1}"),
    ):
        if wrong.any():
            item = int(np.flatnonzero(wrong)[0])
            raise ValueError(f"place: {name} of item {item} is {values[item]}; expected {expected}")


def longest_processing_time(costs: Floats, num_ranks: int) -> Ints:
    """Return the rank of each item: most expensive first, to the least-loaded rank.

    Ties go to the earlier item and the lower rank, so every rank computes the same result.
    """
    work, _ = in_units(costs, np.ones(len(costs), dtype=np.int64), num_ranks)
    return lpt(work, np.zeros(num_ranks, dtype=np.int64))


def round_robin(costs: Floats, num_ranks: int) -> Ints:
    """Return ranks assigned by count, whatever the item sizes: the baseline of image counts."""
    return np.arange(len(costs), dtype=np.int64) % num_ranks


def load_per_rank(weights: NDArray[np.generic], ranks: Ints, num_ranks: int) -> Floats:
    """Return the summed weight per rank, float64 [ranks]."""
    loads = np.bincount(ranks, weights=weights.astype(np.float64), minlength=num_ranks)
    return loads.astype(np.float64)  # numpy returns integer counts if there are no items


def max_over_mean(loads: Floats) -> float:
    """Return the ratio of the slowest rank's load to the mean; 1.0 without load."""
    return float(loads.max() / loads.mean()) if loads.any() else 1.0
