"""Keeps items near the ranks that need them, with no rank slower than a limit.

`stay` starts with every item at home and moves the excess away. It causes the least traffic and
usually meets the limit. Two other functions take an assignment and preserve its loads: `rename`
permutes the work among ranks, and `trade` lets items of equal work exchange ranks.

Work and keys are integers as in `makespan`.
"""

from collections.abc import Sequence
from heapq import heappush, heapreplace

import numpy as np

from kimi_pretrain.dep.makespan import Ints, summed
from kimi_pretrain.parallel.balance import index_bits

NUMBERS = 24  # bits for counting items of one kind

Heaps = Sequence[list[int]]  # heaps of a rank's groups, from near to far


def stay(work: Ints, home: Ints, base: Ints, limit: int, levels: Sequence[Ints]) -> Ints:
    """Return the rank of each item, int64 [items]: home, or as near as the limit allows.

    Items are visited from most to least expensive, because large items move much time with few
    tokens. If an item's home exceeds the limit, the item moves to the nearest group with a rank
    that would have room if everything stayed at home, and there to the least-loaded rank. If there
    is no such rank and the item does not fit at home, it moves to a rank that has room so far;
    smaller items of that rank will leave later.

    Args:
        work: work of each item, int64 [items].
        home: rank that needs each item, int64 [items].
        base: other work of each rank, int64 [ranks].
        limit: target for the slowest load; a few ranks may exceed it.
        levels: group of each rank, int64 [ranks] each, from near to far; the last is one group.
    """
    bits = index_bits(len(base))
    expected = summed(work, home, base)  # includes items that are still to be visited
    order = np.argsort(-work, kind="stable")
    future, spare = _heaps(expected, bits, levels), None
    later, now = expected.tolist(), base.tolist()
    left: list[int] = []
    target: list[int] = []
    for item, more, at in zip(order.tolist(), work[order].tolist(), home[order].tolist()):
        too_much = later[at] - limit
        full = now[at] + more > limit
        to = at
        if too_much > 0 and (full or more <= too_much):
            to = _roomy(future[at], later, limit - more, bits)
            if to < 0 and full:
                spare = spare or _heaps(base, bits, levels)  # entries may be outdated, see `_roomy`
                to = _roomy(spare[at], now, limit - more, bits)
            to = at if to < 0 else to
        if to != at:
            left.append(item)
            target.append(to)
            later[to] += more
            later[at] -= more
            if later[at] < limit:  # it has room again, and its old entries are too large to show it
                for heap in future[at]:
                    heappush(heap, later[at] << bits | at)
        now[to] += more
    ranks = home.copy()
    ranks[left] = target
    return ranks


def _heaps(loads: Ints, bits: int, levels: Sequence[Ints]) -> list[Heaps]:
    """Return the heaps of each rank's groups; the ranks of a group share the list."""
    keys = (loads << bits) | np.arange(len(loads))
    of_level: list[list[list[int]]] = []
    for level in levels:
        order = np.lexsort((keys, level))
        borders = np.searchsorted(level[order], np.arange(int(level.max()) + 2)).tolist()
        ordered = keys[order].tolist()
        heaps = [ordered[begin:end] for begin, end in zip(borders, borders[1:])]
        of_level.append([heaps[group] for group in level.tolist()])
    return list(zip(*of_level))


def _roomy(heaps: Heaps, loads: list[int], room: int, bits: int) -> int:
    """Return the least-loaded rank of the nearest group whose load is at most `room`, or -1.

    Entries are outdated once a load grows; they are corrected when they reach the top.
    """
    mask = (1 << bits) - 1
    for heap in heaps:
        rank = heap[0] & mask
        while heap[0] >> bits != loads[rank]:
            heapreplace(heap, loads[rank] << bits | rank)
            rank = heap[0] & mask
        if loads[rank] <= room:
            return rank
    return -1


def rename(slots: Ints, weight: Ints, home: Ints, free: Ints, levels: Sequence[Ints]) -> Ints:
    """Return the slot of each item after slots are permuted to be near the ranks that need them.

    A slot is a rank, or a block of ranks that share items. The strongest demand of a slot's items
    is served first: for the homes of the items, then for their groups from near to far.

    Args:
        slots: slot of each item, int64 [items].
        weight: importance of keeping the item near, int64 [items].
        home: slot that needs the item, or -1 for none, int64 [items].
        free: slots that may be permuted, all with the same other work, in rising order.
        levels: group of each slot, int64 [slots] each, from near to far.
    """
    if not len(slots) or not len(free):
        return slots
    num_slots = len(levels[0])
    place = np.arange(num_slots, dtype=np.int64)
    open_slots = np.zeros(num_slots, dtype=bool)
    open_slots[free] = True
    empty = open_slots.copy()
    place[free] = -1
    for level in (np.arange(num_slots), *levels):
        asks = np.flatnonzero((place[slots] < 0) & (home >= 0))
        if not len(asks):
            break
        _serve(slots[asks], weight[asks], level[home[asks]], level, place, empty)
    place[place < 0] = np.flatnonzero(empty)
    return place[slots]


def _serve(slots: Ints, weight: Ints, group: Ints, level: Ints, place: Ints, empty: Ints) -> None:
    """Assign slots to positions in the groups that their items need; updates `place`, `empty`."""
    groups = int(level.max()) + 1
    bonds, of = np.unique(slots * groups + group, return_inverse=True)
    strength = np.zeros(len(bonds), dtype=np.int64)
    np.add.at(strength, of, weight)
    vacant: list[list[int]] = [[] for _ in range(groups)]
    for at in np.flatnonzero(empty)[::-1].tolist():
        vacant[level[at]].append(at)  # `pop` takes the lowest first
    placed = (place >= 0).tolist()
    for bond in bonds[np.argsort(-strength, kind="stable")].tolist():
        slot, wanted = divmod(bond, groups)
        if not placed[slot] and vacant[wanted]:
            place[slot] = vacant[wanted].pop()
            empty[place[slot]] = False
            placed[slot] = True


def trade(ranks: Ints, work: Ints, home: Ints, levels: Sequence[Ints]) -> Ints:
    """Return ranks after items of equal work have exchanged ranks to be near their homes.

    For each kind of item, a rank's positions go first to items whose home it is, then to items
    whose home is in its group, from near to far. Every rank keeps its number of items of each kind.

    Args:
        ranks, work, home: rank, work and home of each item, int64 [items].
        levels: as for `stay`.
    """
    _, kind = np.unique(work, return_inverse=True)
    traded = ranks.copy()
    items, places = np.arange(len(ranks)), np.arange(len(ranks))
    for level in (np.arange(len(levels[0])), *levels):
        groups = int(level.max()) + 1
        asked = _numbered(kind[items] * groups + level[home[items]])
        given = _numbered(kind[places] * groups + level[ranks[places]])
        _, ask, give = np.intersect1d(asked, given, assume_unique=True, return_indices=True)
        traded[items[ask]] = ranks[places[give]]
        items, places = np.delete(items, ask), np.delete(places, give)
    return traded


def _numbered(values: Ints) -> Ints:
    """Return distinct values: the low bits count the earlier occurrences of each value."""
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], values[order])
    numbered = np.empty(len(values), dtype=np.int64)
    numbered[order] = values[order] * (1 << NUMBERS) + np.arange(len(values)) - first
    return numbered
