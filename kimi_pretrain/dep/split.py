"""Which items are so large that a block of ranks shares them, and which blocks.

The slowest rank never takes less than the largest item. An item that p ranks share costs each of
them cost / (p * efficiency): more work in all, a lower largest piece. So only the items are split
that hold the slowest rank up, and only where the prediction says that it gains more than a little.

Blocks are aligned to their size, so a smaller one lies inside a larger one or beside it. With the
most shared items placed first, all ranks of a block have the same to do before the next one comes,
and the blocks of one size can be filled as if they were single ranks.
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

WIDTHS = (2, 4, 8, 16)  # ranks that can share an item: the encoder's 16 heads divide by them
GAIN = 1.01  # a split plan is taken if the slowest rank is faster by more than this
ALIKE = 1.002  # bounds that differ by less are equal
NEAR = 1.02  # a plan this near the bound is taken
# What is tried: items above this part of the bound are split (None: as few as reach the bound),
# until each part takes at most this part of it.
CUTS = (
    (None, 1.0),
    (None, 0.25),
    (0.5, 0.5),
    (0.35, 0.35),
    (0.25, 0.25),
    (0.18, 0.18),
    (0.12, 0.12),
)
PIGEONS = 16  # whole items on one rank up to which the bound looks
COARSE = 2_048  # whole items up to which the prediction places each; more, and small ones are sand
SAND = 3  # sand is what takes less than a 2**-3 part of the slowest rank


def choose_splits(
    costs: Floats,
    num_ranks: int,
    max_split: int,
    efficiency: float,
    places: Places | None = None,
) -> Ints:
    """Return how many ranks should share each item: 1, 2, 4, 8 or 16, int64 [items].

    Args:
        costs: seconds of each item on one rank, float64 [items].
        num_ranks: that share the load.
        max_split: the most ranks that may share one item; 1: never split.
        efficiency: what the ranks that share an item keep of their speed, above 0, at most 1.
        places: where the ranks are, to know which blocks exist; all on one node by default.

    Raises:
        ValueError: `places` is about another number of ranks.
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
    """Return what the slowest rank takes at least with the m largest items split, [items + 1].

    The mean, the largest whole item and the largest part, and by pigeonholes k + 1 whole items
    that must meet on one rank.

    Args:
        costs: of the items, falling.
    """
    total = np.concatenate([[0.0], np.cumsum(costs)])
    bounds = (total[-1] + (1 / efficiency - 1) * total) / num_ranks
    bounds[:-1] = np.maximum(bounds[:-1], costs)
    bounds[1:] = np.maximum(bounds[1:], costs[0] / (widest * efficiency))
    for k in range(1, min(PIGEONS, (len(costs) - 1) // num_ranks) + 1):
        last = np.arange(k * num_ranks + 1, len(costs) + 1)  # one item behind the pigeonholes
        meet = total[last] - total[last - k - 1]
        bounds[: len(meet)] = np.maximum(bounds[: len(meet)], meet)
    return bounds


def _search(
    costs: Floats, bounds: Floats, widths: list[int], efficiency: float, places: Places
) -> tuple[float, Ints]:
    """Return the best prediction found and its parts.

    Cuts are tried from the fewest and widest parts to many small ones: small ones fit together
    better, but each split item is more work, so one that splits more has to gain by it.
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
    """Return the fewest parts under which each of the first items takes at most `limit`."""
    parts = np.ones(len(costs), dtype=np.int64)
    parts[:number] = widths[0]
    for width, wider in zip(widths, widths[1:]):
        parts[:number][costs[:number] > limit * width * efficiency] = wider
    return parts


def predicted(costs: Floats, parts: Ints, places: Places, efficiency: float) -> float:
    """Return what the slowest rank would take, in seconds: near what `place` reaches.

    Blocks and large whole items are placed; the many small ones are poured over them.
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
    """Place the items that ranks share, the most shared first, on the least loaded blocks.

    Args:
        work: of each item for each rank that shares it, int64 [items].
        parts: of each item, int64 [items].
        home: rank that needs each item; if given, blocks with the same to do change places until
            they are near it.

    Returns:
        First rank of each item's block, -1 for whole items, int64 [items]; and what that gives
        each rank to do, int64 [ranks].

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
    """Return the blocks of items after blocks with the same to do have changed places."""
    at = np.minimum(np.searchsorted(first, home // width * width), len(first) - 1)
    inside = first[at] == home // width * width
    levels = [level[first] for level in places.levels()]
    free = np.flatnonzero(before == before.min())
    return rename(block, work, np.where(inside, at, -1), free, levels)
