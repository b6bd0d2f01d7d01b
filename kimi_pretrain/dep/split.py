"""Selects the items that are large enough for a block of ranks to share, and places their blocks.

The slowest rank never takes less than the largest item. If p ranks share an item, it costs each of
them cost / (p * efficiency): the total work grows, but the largest part shrinks. So only items that
delay the slowest rank are split, and only if the predicted gain exceeds a threshold.

Blocks are aligned to their size, so two blocks are nested or disjoint. The items with most parts
are placed first, so all ranks of a block have equal work before the next item is placed, and the
blocks of one size can be filled like single ranks.
"""

import numpy as np

from kimi_pretrain.dep.makespan import (
    Floats,
    Ints,
    in_units,
    lpt,
    summed,
)
from kimi_pretrain.dep.nearby import rename
from kimi_pretrain.dep.places import Places, seconds_of_part

WIDTHS = (2, 4, 8, 16)  # ranks that can share an item; all divide the encoder's 16 heads
GAIN = 1.01  # a split plan is used if the slowest rank is faster by more than this factor
ALIKE = 1.002  # bounds within this factor count as equal
NEAR = 1.02  # a plan within this factor of the bound ends the search
# Splits to try: items above the first fraction of the bound are split (None: as few as reach the
# bound), until each part takes at most the second fraction of the bound.
CUTS = (
    (None, 1.0),
    (None, 0.25),
    (0.5, 0.5),
    (0.35, 0.35),
    (0.25, 0.25),
    (0.18, 0.18),
    (0.12, 0.12),
)
PIGEONS = 16  # largest number of whole items per rank in the pigeonhole bound
COARSE = 2_048  # whole items up to which the prediction places each; beyond it, small ones are sand
SAND = 3  # items below 2**-3 of the mean load are sand, which is distributed as a continuous amount


def choose_splits(
    costs: Floats,
    num_ranks: int,
    max_split: int,
    efficiency: float,
    places: Places | None = None,
) -> Ints:
    """Return the number of ranks that should share each item: 1, 2, 4, 8 or 16, int64 [items].

    Args:
        costs: seconds of each item on one rank, float64 [items].
        num_ranks: number of ranks that share the load.
        max_split: most ranks that may share one item; 1: never split.
        efficiency: fraction of their speed that ranks keep when they share an item, in (0, 1].
        places: location of the ranks, which determines the blocks; by default, one node.

    Raises:
        ValueError: `places` has another number of ranks.
    """
    where = Places.together(num_ranks) if places is None else places
    if where.num_ranks != num_ranks:
        raise ValueError(f"choose_splits: {num_ranks} ranks, but places of {where.num_ranks}")
    alone = np.ones(len(costs), dtype=np.int64)
    widths = [w for w in WIDTHS if w <= max_split and len(where.blocks(w))]
    if not widths or not len(costs):
        return alone
    order = np.argsort(-costs, kind="stable")
    falling = costs[order]
    bounds = _bounds(falling, num_ranks, efficiency, widths[-1])
    if bounds[0] <= GAIN * bounds.min():
        return alone
    slowest, parts = _search(falling, bounds, widths, efficiency, where)
    if bounds[0] > GAIN * slowest:
        alone[order] = parts
    return alone


def _bounds(costs: Floats, num_ranks: int, efficiency: float, widest: int) -> Floats:
    """Return lower bounds on the slowest load with the m largest items split, [items + 1].

    Each is the maximum of the mean, the largest whole item, the largest part, and a pigeonhole
    bound of k + 1 whole items that must share a rank.

    Args:
        costs: costs of the items, in falling order.
    """
    total = np.concatenate([[0.0], np.cumsum(costs)])
    bounds = (total[-1] + (1 / efficiency - 1) * total) / num_ranks
    bounds[:-1] = np.maximum(bounds[:-1], costs)
    bounds[1:] = np.maximum(bounds[1:], costs[0] / (widest * efficiency))
    for k in range(1, min(PIGEONS, (len(costs) - 1) // num_ranks) + 1):
        last = np.arange(k * num_ranks + 1, len(costs) + 1)  # one item more than pigeonholes
        meet = total[last] - total[last - k - 1]
        bounds[: len(meet)] = np.maximum(bounds[: len(meet)], meet)
    return bounds


def _search(
    costs: Floats, bounds: Floats, widths: list[int], efficiency: float, places: Places
) -> tuple[float, Ints]:
    """Return the best prediction and its parts.

    The search goes from few wide splits to many small parts. Small parts balance better, but each
    split adds work, so a plan with more splits must improve the prediction.
    """
    least = float(bounds.min())
    first = int(np.flatnonzero(bounds <= ALIKE * least)[0])
    best = (np.inf, np.ones(len(costs), dtype=np.int64))
    for share, fill in CUTS:
        number = first if share is None else int((costs > share * least).sum())
        if number and bounds[number] * GAIN < best[0]:
            parts = _parts(costs, number, fill * least, widths, efficiency)
            found = predicted(costs, parts, places, efficiency)
            best = (found, parts) if found * GAIN < best[0] else best
        if best[0] <= NEAR * least:
            break
    return best


def _parts(costs: Floats, number: int, limit: float, widths: list[int], efficiency: float) -> Ints:
    """Return the fewest parts with which each of the first `number` items takes at most `limit`."""
    parts = np.ones(len(costs), dtype=np.int64)
    parts[:number] = widths[0]
    for width, wider in zip(widths, widths[1:]):
        parts[:number][costs[:number] > limit * width * efficiency] = wider
    return parts


def predicted(costs: Floats, parts: Ints, places: Places, efficiency: float) -> float:
    """Return the predicted seconds of the slowest rank, close to the result of `place`.

    Blocks and large whole items are placed; the many small items fill the ranks as a continuous
    amount.
    """
    work, power = in_units(seconds_of_part(costs, parts, efficiency), parts, places.num_ranks)
    _, base = place_blocks(work, parts, places)
    whole = work[parts == 1]
    mean = (int(base.sum()) + int(whole.sum())) // len(base)
    heavy = whole > (mean >> SAND if len(whole) > COARSE else 0)
    loads = summed(whole[heavy], lpt(whole[heavy], base), base)
    rising = np.sort(loads)
    level = (int(whole[~heavy].sum()) + np.cumsum(rising)) // np.arange(1, len(loads) + 1)
    return float(np.ldexp(float(max(int(loads.max()), int(level.min()))), -power))


def place_blocks(
    work: Ints, parts: Ints, places: Places, home: Ints | None = None
) -> tuple[Ints, Ints]:
    """Place the shared items, those with most parts first, on the least-loaded blocks.

    Args:
        work: work of each item on each rank that shares it, int64 [items].
        parts: number of ranks that share each item, int64 [items].
        home: rank that needs each item; if given, blocks of equal work are permuted to be near it.

    Returns:
        First rank of each item's block, -1 for whole items, int64 [items]; and the resulting work
        of each rank, int64 [ranks].

    Raises:
        ValueError: an item has more parts than any block has ranks.
    """
    rank = np.full(len(parts), -1, dtype=np.int64)
    base = np.zeros(places.num_ranks, dtype=np.int64)
    for width in WIDTHS[::-1]:
        items = np.flatnonzero(parts == width)
        if not len(items):
            continue
        first = places.blocks(width)
        if not len(first):
            raise ValueError(
                f"item {items[0]} is to be shared by {width} ranks, but no aligned block of {width}"
                f" of the {places.num_ranks} ranks lies on one node; lower dep.max_split"
            )
        before = base[first]
        block = lpt(work[items], before)
        if home is not None:
            block = _near(block, work[items], home[items], width, first, before, places)
        rank[items] = first[block]
        inside = first[:, None] + np.arange(width)
        base[inside] = summed(work[items], block, before)[:, None]
    return rank, base


def _near(
    block: Ints, work: Ints, home: Ints, width: int, first: Ints, before: Ints, places: Places
) -> Ints:
    """Return the blocks of items after blocks of equal work have been permuted."""
    at = np.minimum(np.searchsorted(first, home // width * width), len(first) - 1)
    inside = first[at] == home // width * width
    levels = [level[first] for level in places.levels()]
    free = np.flatnonzero(before == before.min())
    return rename(block, work, np.where(inside, at, -1), free, levels)
