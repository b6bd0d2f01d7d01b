"""Which rank encodes which media item: one balanced assignment over the whole global batch. Pure.

Longest-processing-time: items by falling cost, each to the least loaded rank. Every rank computes
the same answer from metadata alone, so nobody talks about who does what (phase 0).
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def longest_processing_time(costs: Floats, num_ranks: int) -> Ints:
    """Return the rank of each item: most costly first, to the least loaded rank.

    Ties go to the earlier item and the lower rank, so the answer is the same everywhere.
    """
    ranks = np.zeros(len(costs), dtype=np.int64)
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for item in np.argsort(-costs, kind="stable"):
        load, rank = loads[0]
        ranks[item] = rank
        heapq.heapreplace(loads, (load + float(costs[item]), rank))
    return ranks


def round_robin(costs: Floats, num_ranks: int) -> Ints:
    """Return ranks dealt out by count, blind to sizes: the baseline of image counts."""
    return np.arange(len(costs), dtype=np.int64) % num_ranks


def load_per_rank(weights: NDArray[np.generic], ranks: Ints, num_ranks: int) -> Floats:
    """Return the summed weight of each rank, float64 [ranks]."""
    loads = np.bincount(ranks, weights=weights.astype(np.float64), minlength=num_ranks)
    return loads.astype(np.float64)  # without items numpy counts in integers


def max_over_mean(loads: Floats) -> float:
    """Return how much longer the slowest rank takes than perfect balance; 1.0 for no load."""
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


@dataclass(frozen=True)
class VisionPlan:
    """Who encodes each item of a step, and who needs it. The same on every rank.

    Attributes:
        encoder: rank that encodes item i, [items].
        owner: first-stage rank of the replica that owns its row, [items].
        tokens: embeddings of item i, [items].
        patches: patches of item i, [items].
        num_ranks: ranks of the job.
    """

    encoder: Ints
    owner: Ints
    tokens: Ints
    patches: Ints
    num_ranks: int

    def encoded_by(self, rank: int) -> Ints:
        """Return the items that `rank` encodes, in the order it encodes and sends them."""
        items = np.flatnonzero(self.encoder == rank)
        return items[np.argsort(self.owner[items], kind="stable")]

    def received_by(self, rank: int) -> Ints:
        """Return the items that `rank` receives, in the order they arrive."""
        items = np.flatnonzero(self.owner == rank)
        return items[np.argsort(self.encoder[items], kind="stable")]

    def tokens_to(self, rank: int) -> list[int]:
        """Return how many embeddings `rank` sends to each rank."""
        items = self.encoded_by(rank)
        sums = load_per_rank(self.tokens[items], self.owner[items], self.num_ranks)
        return [int(total) for total in sums]

    def tokens_from(self, rank: int) -> list[int]:
        """Return how many embeddings `rank` receives from each rank."""
        items = self.received_by(rank)
        sums = load_per_rank(self.tokens[items], self.encoder[items], self.num_ranks)
        return [int(total) for total in sums]


def plan_vision(costs: Floats, owner: Ints, tokens: Ints, patches: Ints, ranks: int) -> VisionPlan:
    """Assign a step's items to ranks; see `VisionPlan` for the columns."""
    encoder = longest_processing_time(costs, ranks)
    return VisionPlan(encoder, owner, tokens, patches, ranks)
