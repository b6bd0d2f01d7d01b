"""Which rank encodes which media item: one assignment over the whole global batch. Pure.

Terms: *work* is an item's seconds as an integer, *home* the rank that needs it, *base* what a rank
does anyway (its parts of split items), its *load* base and the work given to it; *levels* group
ranks from near to far: replica on one node, replica, node, all. `place` makes the slowest rank as
fast as it can, then lets embeddings travel little:

    blocks   items of several parts (`choose_splits`) go to blocks of 2 to 16 ranks: `split`
    bound    nothing is faster than the mean, the largest item, or two large items on one rank; with
             the mean far below it, large items decide, and `stay` under the bound is the answer
    balance  LPT (Graham, 1969): most costly first, to the least loaded rank; if that is not near
             the bound, packed under the least capacity that works, then ranks swap items:
             `makespan`. Its slowest load is the limit from here on
    stay     all items begin at home; most costly first, a home over the limit sends them to the
             least loaded rank with room in the nearest group: `nearby`. Tried with larger and
             larger pools of smallest items, dealt last by LPT, then swaps, till no load is over
    else     the balanced assignment, nearer at the same loads: ranks exchange all their work
             (`rename`), items of equal work change places (`trade`)

Every rank computes the same answer from metadata alone, without communication (phase 0).
`longest_processing_time` and `round_robin` are the plain baselines.
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

SLACK = 5  # mean below the bound by more than 2**-5 of it: large items decide, try `stay` alone
# Tried in turn: hold back the smallest items, 2**-n of all work, to deal last; 62: none.
POOLS = (62, 8, 7, 6, 5, 4, 3)
ATTEMPTED = 49_152  # items x attempts in all, but 3 attempts at least (2 or none if packed tightly)


def place(costs: Floats, parts: Ints, home: Ints, places: Places, efficiency: float) -> Placement:
    """Give every item to a rank, or to a block of ranks; see `Placement`.

    The slowest rank is as fast as it can be made, never slower than with longest processing time
    beside the same blocks. Among such placements items stay near the ranks that need them: on the
    rank itself, in its replica, on its node.

    Args:
        costs: seconds of each item on one rank, float64 [items].
        parts: ranks that share each item, as from `choose_splits`, int64 [items].
        home: rank that needs each item, int64 [items].
        efficiency: what the ranks that share an item keep of their speed, above 0, at most 1.

    Raises:
        ValueError: a cost, home or number of parts that cannot be, or no block for a split item.
    """
    _check(costs, parts, home, places, efficiency)
    work, _ = in_units(seconds_of_part(costs, parts, efficiency), parts, places.num_ranks)
    rank, base = place_blocks(work, parts, places, home)
    whole = parts == 1
    rank[whole] = _place_whole(work[whole], home[whole], base, places)
    return Placement(rank, parts.astype(np.int64))


def _place_whole(work: Ints, home: Ints, base: Ints, places: Places) -> Ints:
    """Return the rank of each whole item beside what blocks give ranks to do."""
    levels, bound = places.levels(), least_makespan(work, base)
    if int(work.sum() + base.sum()) // len(base) <= bound - (bound >> SLACK):
        # The largest item sets the bound; no balancing needed.
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
    """Make assignments that are near and, with some luck, under the limit; see `_place_whole`.

    Args:
        packed: the balanced assignment, if large items had to be packed tightly for it; then the
            first kind of attempt, which is blind to that, seldom succeeds.
    """
    tries = max(3, ATTEMPTED // max(1, len(work)))
    if packed is not None:
        tries = 2 if len(work) <= FEW else 0
    for pool in POOLS[:tries]:
        yield _stay_but_small(work, home, base, limit, levels, pool)
    if packed is not None:
        yield _stay_beside_large(work, home, base, limit, levels, packed)


def _nearer(ranks: Ints, work: Ints, home: Ints, base: Ints, levels: list[Ints]) -> Ints:
    """Return an assignment with the same loads, items nearer to their homes."""
    alike = np.flatnonzero(base == base.min())  # ranks that can change places
    return trade(rename(ranks, work, home, alike, levels), work, home, levels)


def _stay_but_small(
    work: Ints, home: Ints, base: Ints, limit: int, levels: list[Ints], pool: int
) -> Ints:
    """Return ranks from `stay`, with a pool of the smallest items dealt last, to even out."""
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
    """Return ranks with large items as they were packed, which is hard, and small ones at home."""
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
    """Return the rank of each item: most costly first, to the least loaded rank.

    Ties go to the earlier item and the lower rank, so the answer is the same everywhere.
    """
    work, _ = in_units(costs, np.ones(len(costs), dtype=np.int64), num_ranks)
    return lpt(work, np.zeros(num_ranks, dtype=np.int64))


def round_robin(costs: Floats, num_ranks: int) -> Ints:
    """Return ranks dealt out by count, whatever the sizes: the baseline of image counts."""
    return np.arange(len(costs), dtype=np.int64) % num_ranks


def load_per_rank(weights: NDArray[np.generic], ranks: Ints, num_ranks: int) -> Floats:
    """Return the summed weight of each rank, float64 [ranks]."""
    loads = np.bincount(ranks, weights=weights.astype(np.float64), minlength=num_ranks)
    return loads.astype(np.float64)  # without items numpy counts in integers


def max_over_mean(loads: Floats) -> float:
    """Return how much longer the slowest rank takes than perfect balance; 1.0 for no load."""
    return float(loads.max() / loads.mean()) if loads.any() else 1.0
