"""Describes the location of ranks and the placement of items, with seconds and traffic per rank.

A placement assigns each media item to one rank, or to an aligned block of 2, 4, 8 or 16 ranks that
share it. The module uses only numpy, so planning and simulation need no device.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Moved(NamedTuple):
    """Tokens of a step by the distance between the encoding rank and the rank that needs them.

    Attributes:
        stay: encoded by the rank that needs them.
        inside_node: encoded by another rank of its node.
        across_nodes: encoded by a rank of another node.
    """

    stay: int
    inside_node: int
    across_nodes: int


@dataclass(frozen=True)
class Places:
    """Location of each rank. From near to far: the rank itself, its replica, its node.

    Attributes:
        replica: replica of each rank, int64 [ranks].
        node: node of each rank, int64 [ranks].
    """

    replica: Ints
    node: Ints

    def __post_init__(self) -> None:
        if self.replica.shape != self.node.shape or self.replica.ndim != 1 or not self.replica.size:
            raise ValueError(
                f"places: replica {self.replica.shape} and node {self.node.shape} must be "
                "vectors of one entry per rank, and there must be a rank"
            )

    @classmethod
    def together(cls, num_ranks: int) -> "Places":
        """Return places for ranks that are all in one replica on one node."""
        return cls(np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.replica)

    def blocks(self, parts: int) -> Ints:
        """Return the first ranks of the blocks of `parts` ranks that may share an item, rising.

        A block starts at a multiple of its size, is complete, and is on one node, because its ranks
        exchange attention heads in every layer.
        """
        members = self.node[: self.num_ranks // parts * parts].reshape(-1, parts)
        alike = (members == members[:, :1]).all(axis=1)
        return np.flatnonzero(alike).astype(np.int64) * parts

    def levels(self) -> list[Ints]:
        """Return the group numbers of the ranks, int64 [ranks] each, from near to far.

        The levels are replica on one node, replica, node, and all ranks. Levels in which every rank
        is a group, and levels with the same groups as an earlier one, are omitted.
        """
        _, replica = np.unique(self.replica, return_inverse=True)
        _, node = np.unique(self.node, return_inverse=True)
        _, both = np.unique(replica * (node.max() + 1) + node, return_inverse=True)
        found: list[Ints] = []
        for level in (both, replica, node):
            alone = level.max() == self.num_ranks - 1
            if not alone and not any(np.array_equal(level, other) for other in found):
                found.append(level.astype(np.int64))
        if not found or found[-1].any():
            found.append(np.zeros(self.num_ranks, dtype=np.int64))
        return found


@dataclass(frozen=True)
class Placement:
    """Assignment of each item to the ranks that encode it.

    Attributes:
        rank: first rank of the block that encodes item i, int64 [items].
        parts: number of ranks that share item i, 1, 2, 4, 8 or 16, int64 [items]; `rank % parts`
            is 0.
    """

    rank: Ints
    parts: Ints

    def members(self) -> tuple[Ints, Ints, Ints]:
        """Return (item, part, rank) of every share of work, int64 [shares] each, by item."""
        item = np.repeat(np.arange(len(self.parts), dtype=np.int64), self.parts)
        start = np.cumsum(self.parts) - self.parts
        part = np.arange(len(item), dtype=np.int64) - start[item]
        return item, part, self.rank[item] + part


def token_border(tokens: Any, parts: Any, member: Any) -> Any:
    """Return the begin of a member's range of an item's tokens; it is also the previous one's end.

    Planning, exchange and encoder all use this rule to cut a shared item. It takes integers or
    arrays of them.
    """
    return tokens * member // parts


def seconds_of_part(costs: Floats, parts: Ints, efficiency: float) -> Floats:
    """Return the seconds of an item on each rank that shares it, float64 [items]."""
    return np.where(parts > 1, costs / (parts * efficiency), costs)


def loads(placement: Placement, costs: Floats, num_ranks: int, efficiency: float) -> Floats:
    """Return the predicted seconds of each rank, float64 [ranks].

    Args:
        costs: seconds of each item on one rank, float64 [items].
        efficiency: fraction of their speed that ranks keep when they share an item.
    """
    item, _, rank = placement.members()
    seconds = seconds_of_part(costs, placement.parts, efficiency)
    sums = np.bincount(rank, weights=seconds[item], minlength=num_ranks)
    return sums.astype(np.float64)  # numpy returns integer counts if there are no items


def moved(placement: Placement, tokens: Ints, home: Ints, places: Places) -> Moved:
    """Return the tokens of a placement by the distance of their transfer.

    Args:
        tokens: merged tokens of each item, int64 [items]; those of a split item are cut evenly.
        home: rank that needs each item, int64 [items].
    """
    item, part, rank = placement.members()
    size, parts = tokens[item], placement.parts[item]
    share = token_border(size, parts, part + 1) - token_border(size, parts, part)
    stay = rank == home[item]
    near = (places.node[rank] == places.node[home[item]]) & ~stay
    return Moved(*(int(share[where].sum()) for where in (stay, near, ~(stay | near))))
