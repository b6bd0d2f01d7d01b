"""Spreads work over ranks so that the slowest rank is as fast as possible, ignoring locality.

There are three algorithms. Each starts from the fixed work of the ranks (`base`, their shares of
split items):

    lpt        longest processing time: most expensive first, to the least-loaded rank (Graham,
    1969;
               `kimi_pretrain.parallel.balance`)
    tightest   most expensive first, each to the fullest rank with room under a capacity; searches
               the smallest capacity (as in MULTIFIT: Coffman, Garey and Johnson, 1978); better than
               LPT if a rank has few large items
    swaps      local search: a move or an exchange between a slow rank and a fast one

Work is an integer, seconds times a power of two. Sums are exact, so no choice depends on the order
of a sum or on the machine. A load and its rank form one integer with the load in the high bits:
ties go to the lower rank, and heaps need no tuples, which accounts for most of the speed.
"""

from bisect import bisect_right, insort

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.parallel.balance import index_bits, least_loaded

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WORD = 62  # bits of a load and its rank together
FEW = 8_192  # items up to which a result is improved until 2**-10 (0.1%) above the bound;
GOOD, GOOD_OF_FEW = 7, 10  # with more items, which take longer, until 2**-7 (0.8%)
PIGEONS = 16  # largest number of items per rank in the pigeonhole bound
SMALL = 4  # work below 2**-4 of a capacity is not packed tightly, because it fits anywhere
PACKED = 32_768  # items to pack in total during the search for a capacity; bounds the planning time
PACKINGS = 10  # most packings
SWAPPED = 98_304  # items to examine in total while ranks exchange work
ROUNDS = 24  # most rounds of exchanges
FINE = 32  # items per rank that may be exchanged; if there are more, the smallest, which fit best
SHIFTS = 8  # unsuccessful pairings before the search ends


def in_units(seconds: Floats, copies: Ints, num_ranks: int) -> tuple[Ints, int]:
    """Return work in integers, and the power of two by which seconds were scaled.

    Args:
        seconds: work of each item on each rank that shares it.
        copies: number of ranks that share it.
        num_ranks: number of ranks that the work will be divided among.
    """
    if not len(seconds):
        return np.zeros(0, dtype=np.int64), 0
    most = float(seconds.max()) * int(copies.sum())  # a float sum would depend on its order
    power = WORD - 1 - index_bits(num_ranks) - int(np.frexp(most)[1])
    return np.rint(np.ldexp(seconds, power)).astype(np.int64), power


def summed(work: Ints, ranks: Ints, base: Ints) -> Ints:
    """Return the load of each rank, int64 [ranks]."""
    loads = base.copy()
    np.add.at(loads, ranks, work)
    return loads


def least_makespan(work: Ints, base: Ints) -> int:
    """Return a lower bound on the slowest rank's load, for any assignment.

    It is the maximum of the mean, the largest item, and pigeonhole bounds: of the k * ranks + 1
    largest items, k + 1 share a rank (two for k = 1), and take at least the k + 1 smallest of them.
    """
    bound = max(-(-int(work.sum() + base.sum()) // len(base)), int(base.max()))
    if not len(work):
        return bound
    bound = max(bound, int(work.max()) + int(base.min()))
    largest = np.sort(work)[::-1]
    for k in range(1, min(PIGEONS, (len(work) - 1) // len(base)) + 1):
        last = k * len(base) + 1
        bound = max(bound, int(largest[last - k - 1 : last].sum()))
    return bound


def lpt(work: Ints, base: Ints) -> Ints:
    """Return the rank of each item: most expensive first, to the least-loaded rank.

    Ties go to the earlier item and the lower rank.
    """
    order = np.argsort(-work, kind="stable")
    ranks = np.empty(len(work), dtype=np.int64)
    ranks[order] = least_loaded(work[order].tolist(), base.tolist())
    return ranks


def balance(work: Ints, base: Ints) -> tuple[Ints, bool]:
    """Return the rank of each item, int64 [items], and whether large items were packed tightly.

    The slowest rank is never slower than under `lpt`, and often faster.

    Args:
        work: work of each item, int64 [items].
        base: other work of each rank, int64 [ranks].
    """
    bound = least_makespan(work, base)
    good = bound + (bound >> (GOOD_OF_FEW if len(work) <= FEW else GOOD))
    best = lpt(work, base)
    slowest = int(summed(work, best, base).max())
    if slowest <= good:
        return best, False
    packed = _tightest(work, base, bound, slowest)
    best = swaps(best if packed is None else packed, work, base, good)
    return best, int(summed(work, best, base).max()) < slowest


def _tightest(work: Ints, base: Ints, low: int, high: int) -> Ints | None:
    """Return ranks under the smallest feasible capacity found between `low` and `high`.

    Returns:
        None if no tried capacity improves on `high`.
    """
    found = None
    for _ in range(min(PACKINGS, max(1, PACKED // len(work)))):
        capacity = low + (high - low) // 4
        ranks = _pack(work, base, capacity)
        reached = high if ranks is None else int(summed(work, ranks, base).max())
        if reached < high:
            found, high = ranks, reached
        else:
            low = capacity
        if high <= low + (low >> GOOD_OF_FEW):
            break
    return found


def _pack(work: Ints, base: Ints, capacity: int) -> Ints | None:
    """Pack the large items, most expensive first, each on the fullest rank with room; then use LPT.

    Returns:
        None if a large item does not fit.
    """
    bits = index_bits(len(base))
    order = np.argsort(-work, kind="stable")
    large = order[work[order] > capacity >> SMALL]
    keys = np.sort((base << bits) | np.arange(len(base))).tolist()
    top = (capacity + 1 << bits) - 1  # largest key of a full rank
    taken: list[int] = []
    for more in (work[large] << bits).tolist():
        place = bisect_right(keys, top - more) - 1
        if place < 0:
            return None
        key = keys.pop(place)
        insort(keys, key + more)
        taken.append(key)
    ranks = np.empty(len(work), dtype=np.int64)
    ranks[large] = np.array(taken, dtype=np.int64) & ((1 << bits) - 1)
    small = order[len(large) :]
    ranks[small] = lpt(work[small], summed(work[large], ranks[large], base))
    return ranks


def swaps(ranks: Ints, work: Ints, base: Ints, enough: int) -> Ints:
    """Improve an assignment by moves and exchanges between slow and fast ranks.

    The slowest and the fastest rank form a pair, the next two another, and so on; all pairs improve
    at once. If this does not help the slowest rank, the next rounds shift the pairing.

    Args:
        ranks: rank of each item, int64 [items].
        work, base: as in `balance`.
        enough: target for the slowest load; the search stops there.

    Returns:
        Ranks under which the slowest is as fast as before, or faster.
    """
    fine, coarse = np.split(np.argsort(work, kind="stable"), [FINE * len(base)])
    if len(coarse):
        ranks = ranks.copy()
        base = summed(work[coarse], ranks[coarse], base)
        ranks[fine] = swaps(ranks[fine], work[fine], base, enough)
        return ranks
    shift, looked, loads = 0, 0, summed(work, ranks, base)
    for _ in range(ROUNDS):
        slowest = int(loads.max())
        if slowest <= enough or shift >= min(SHIFTS, len(base) - 1) or looked > SWAPPED:
            break
        order = np.argsort(loads, kind="stable")
        pairs = min(len(base) // 2, int((loads > enough).sum()))
        slow, fast = order[::-1][:pairs], np.roll(order[: len(base) - pairs], -shift)[:pairs]
        looked += 2 * pairs * len(work) // len(base)
        ranks = _exchange(ranks, work, loads, slow, fast)
        loads = summed(work, ranks, base)
        shift = 0 if int(loads.max()) < slowest else shift + 1
    return ranks


def _exchange(ranks: Ints, work: Ints, loads: Ints, slow: Ints, fast: Ints) -> Ints:
    """Return ranks after the best helpful move or exchange of each pair of ranks.

    For an item x of the slow rank and y of the fast one, the ideal x - y is half the difference of
    their loads. For each x, binary search finds the two closest y among the fast rank's sorted
    items; a zero entry stands for a move without exchange.
    """
    width, nothing = WORD - index_bits(len(loads)), np.full(len(fast), -1, dtype=np.int64)
    give, of = _of_chosen(ranks, slow, len(loads))
    take, pair = _of_chosen(ranks, fast, len(loads))
    keys = np.concatenate([np.arange(len(fast)) << width, (pair << width) | work[take]])
    order = np.argsort(keys, kind="stable")
    keys, take = keys[order], np.concatenate([nothing, take])[order]

    half = (loads[slow] - loads[fast])[of] // 2
    below = np.searchsorted(keys, (of << width) + np.maximum(work[give] - half, 0), "right") - 1
    at = np.append(below, np.minimum(below + 1, len(keys) - 1))
    of, give = np.tile(of, 2), np.tile(give, 2)
    shed = work[give] - (keys[at] & ((1 << width) - 1))
    after = np.maximum(loads[slow][of] - shed, loads[fast][of] + shed)
    helps = np.flatnonzero((keys[at] >> width == of) & (after < loads[slow][of]))
    best = helps[np.lexsort((after[helps], of[helps]))]
    best = best[np.flatnonzero(np.diff(of[best], prepend=-1))]  # the best of each pair of ranks

    ranks, back = ranks.copy(), take[at[best]]
    ranks[give[best]] = fast[of[best]]
    ranks[back[back >= 0]] = slow[of[best][back >= 0]]
    return ranks


def _of_chosen(ranks: Ints, chosen: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """Return the items of the chosen ranks, with the index of each item's rank among the chosen."""
    place = np.full(num_ranks, -1, dtype=np.int64)
    place[chosen] = np.arange(len(chosen))
    items = np.flatnonzero(place[ranks] >= 0)
    return items, place[ranks[items]]
