"""Rank arithmetic of a layout: replica, node and first stage of every rank, without processes.

The order is Megatron-Core's: tensor-parallel ranks are neighbours, then context-parallel ranks,
then replicas, then pipeline stages. `engine.mesh` asserts that the groups it builds agree.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.config import Config, replicas_per_scope
from kimi_pretrain.parallel.layout import LayoutConfig

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ranks:
    """Replica, node and first stage of all ranks of a layout."""

    layout: LayoutConfig
    per_node: int

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.layout.world_size()

    @property
    def replica(self) -> Ints:
        """Replica of each rank, int64 [ranks]."""
        shared = self.layout.cp * self.layout.tp
        return np.arange(self.world_size) // shared % self.layout.dp

    @property
    def node(self) -> Ints:
        """Node of each rank, int64 [ranks]."""
        return np.arange(self.world_size) // self.per_node

    @property
    def first_stage(self) -> Ints:
        """First-stage rank of each replica and row part, int64 [replicas, cp * tp]."""
        layout = self.layout
        return np.arange(layout.dp * layout.cp * layout.tp).reshape(layout.dp, -1)


def scopes(config: Config) -> list[Ints]:
    """Return the ranks of each group that shares the encoding of its media, rising and disjoint."""
    ranks = Ranks(config.layout, config.dep.ranks_per_node)
    group = ranks.replica // replicas_per_scope(config)
    return [np.flatnonzero(group == number) for number in range(int(group.max()) + 1)]
