"""List scheduling: assigns each job, in the given order, to the least-loaded member.

With the largest job first, this is longest processing time (LPT): the largest load is at most
4/3 - 1/(3 m) times the optimum on m members (Graham, 1969, "Bounds on multiprocessing timing
anomalies"). The functions are pure and use integers, so sums are exact and all ranks compute the
same assignment without communication.
"""

from collections.abc import Iterable, Sequence
from heapq import heapreplace


def least_loaded(costs: Iterable[int], loads: Sequence[int]) -> list[int]:
    """Return the member that takes each job; ties go to the member with the lower index.

    A member's load and index form one integer with the load in the high bits. A heap of integers
    needs no tuples, which accounts for most of the speed.

    Args:
        costs: costs of the jobs, 0 or more, in the order of assignment.
        loads: initial load of each member.
    """
    bits = index_bits(len(loads))
    keys = sorted((load << bits) | index for index, load in enumerate(loads))  # already a heap
    mask = (1 << bits) - 1
    return [heapreplace(keys, keys[0] + (cost << bits)) & mask for cost in costs]


def least_loaded_of(jobs: Iterable[tuple[int, Sequence[int]]], loads: Sequence[int]) -> list[int]:
    """Return the member that takes each job, as `least_loaded`, with a list of allowed members.

    Args:
        jobs: cost of each job, and the members that may take it.
        loads: initial load of each member.
    """
    loads, taken = list(loads), []
    for cost, allowed in jobs:
        member = min(allowed, key=lambda index: (loads[index], index))
        loads[member] += cost
        taken.append(member)
    return taken


def index_bits(count: int) -> int:
    """Return the number of bits for an index below `count`."""
    return max(1, (count - 1).bit_length())
