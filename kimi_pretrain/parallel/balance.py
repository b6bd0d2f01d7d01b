"""List scheduling: each job, in the order given, to the member with the least load so far.

With the largest job first this is longest processing time (LPT): the most loaded member has at most
4/3 - 1/(3 m) of what the best division gives it on m members (Graham, 1969, "Bounds on
multiprocessing timing anomalies"). Pure, and in integers: sums are exact, so that all ranks come to
the same answer by themselves.
"""

from collections.abc import Iterable, Sequence
from heapq import heapreplace


def least_loaded(costs: Iterable[int], loads: Sequence[int]) -> list[int]:
    """Return the member that takes each job; equally loaded ones take jobs in their order.

    Load and index of a member are one integer, load first: a heap of them needs no tuples, which
    is most of the speed.

    Args:
        costs: of the jobs, 0 or more, in the order in which they are given away.
        loads: of each member before.
    """
    bits = index_bits(len(loads))
    keys = sorted((load << bits) | index for index, load in enumerate(loads))  # already a heap
    mask = (1 << bits) - 1
    return [heapreplace(keys, keys[0] + (cost << bits)) & mask for cost in costs]


def least_loaded_of(jobs: Iterable[tuple[int, Sequence[int]]], loads: Sequence[int]) -> list[int]:
    """Return the member that takes each job, as `least_loaded`, where not every one may take it.

    Args:
        jobs: cost of each job, and the members that may take it.
        loads: of each member before.
    """
    loads, taken = list(loads), []
    for cost, allowed in jobs:
        member = min(allowed, key=lambda index: (loads[index], index))
        loads[member] += cost
        taken.append(member)
    return taken


def index_bits(count: int) -> int:
    """Return the bits that an index below `count` takes."""
    return max(1, (count - 1).bit_length())
