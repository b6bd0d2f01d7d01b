"""Vision planner, phase 0: assigns the media items of a step's plan to ranks. Pure.

The rows of a step determine the replica that needs an item, the layout determines the first-stage
rank, and the cost model estimates the item's seconds. `dep.assign` spreads the items over the
ranks, and `dep.vision_plan` derives the token transfers between ranks.
"""

import threading
from collections import deque

import numpy as np
from numpy.typing import NDArray

from data_pipeline.plan.planner import GlobalPlan
from kimi_pretrain.config import GIB, ITEMSIZE, Config
from kimi_pretrain.dep.assign import choose_splits, place, round_robin
from kimi_pretrain.dep.bubble_planner import BubblePlanner
from kimi_pretrain.dep.bubble_times import Learning
from kimi_pretrain.dep.cost import CostModel
from kimi_pretrain.dep.memory_limit import check_memory, vision_bytes
from kimi_pretrain.dep.places import Placement, Places
from kimi_pretrain.dep.row_order import microbatch_order
from kimi_pretrain.dep.vision_plan import (
    Destinations,
    Ints,
    VisionPlan,
    grids_of,
    shares_of,
    spans_of,
)
from kimi_pretrain.parallel.ranks import Ranks, scopes
from kimi_pretrain.parallel.sequence import SequenceParts


class VisionPlanner:
    """Plans the vision work of steps and caches the latest plans, used by both loader and step.

    `training`: True if steps have backward passes, and so bubbles for vision work (`dep.bubbles`).
    """

    def __init__(self, config: Config, *, training: bool = True):
        self.config = config
        self.ranks = Ranks(config.layout, config.dep.ranks_per_node)
        self.scopes = scopes(config)
        self.order = np.concatenate(self.scopes)  # all ranks, with those of a scope adjacent
        self.costs = CostModel.configured(config)
        layout, rows = config.layout, config.train.rows_per_microbatch
        self.parts = SequenceParts(rows * config.data.seq_len, layout.cp, layout.tp)
        self.bubbles = None
        if training and config.in_bubbles():
            self.bubbles = BubblePlanner(config, self.ranks, self.scopes)
        self.learning = Learning(config)
        most = 2 + config.data.prefetch_steps
        self._recent: deque[tuple[GlobalPlan, VisionPlan]] = deque(maxlen=most)
        self._lock = threading.Lock()  # the loader calls from its own thread

    def plan(self, plan: GlobalPlan) -> VisionPlan:
        """Assign the items of a global batch to ranks.

        Raises:
            TooMuchMemory: a rank's media would exceed `dep.memory_limit_gib`.
        """
        with self._lock:
            for planned, vision in self._recent:
                if planned is plan:
                    return vision
        vision = self._plan(plan)
        limit = self.config.dep.memory_limit_gib
        if limit is not None:
            check_memory(self.memory(plan, vision), int(limit * GIB))
        with self._lock:
            self._recent.append((plan, vision))
        return vision

    def memory(self, plan: GlobalPlan, vision: VisionPlan) -> NDArray[np.int64]:
        """Return the bytes of the step's media on each rank, int64 [ranks]."""
        size, config = ITEMSIZE[self.config.train.dtype], self.config
        together = vision if vision.bubbles is None else vision.together()
        found = vision_bytes(
            together, grids_of(plan), config.model.vision, size, config.dep.max_patches_per_chunk
        )
        return found if vision.bubbles is None else found + vision.bubbles.needed

    def _plan(self, plan: GlobalPlan) -> VisionPlan:
        where = self._destinations(plan)
        patches = plan.items.patches.astype(np.int64)
        tokens = plan.items.tokens.astype(np.int64)
        costs, home = self.costs.seconds(patches), where.home
        placement = self._placement(costs, home)
        rank, bubbles = placement.rank, None
        if self.bubbles is not None:
            alone, learned = np.flatnonzero(placement.parts == 1), self.learning.of(plan.step)
            bubbles = self.bubbles.plan(plan, alone, where, costs, learned)
            rank[alone] = bubbles.plan.rank[bubbles.unit[alone]]
        return VisionPlan(
            rank=rank,
            parts=placement.parts,
            home=home,
            tokens=tokens,
            patches=patches,
            costs=costs,
            split_efficiency=self.config.dep.split_efficiency,
            order=self.order,
            spans=spans_of(shares_of(rank, placement.parts, tokens, self.order), where),
            bubbles=bubbles,
        )

    def _destinations(self, plan: GlobalPlan) -> Destinations:
        """Return the first-stage ranks that need each item, with its microbatch and position."""
        rows_per_replica = plan.num_rows // self.config.layout.dp
        replica, row = np.divmod(plan.items.row.astype(np.int64), rows_per_replica)
        number, row = np.divmod(row, self.config.train.rows_per_microbatch)
        place = np.argsort(microbatch_order(plan, self.config), axis=1)
        return Destinations(
            microbatch=place[replica, number],
            position=row * plan.seq_len + plan.items.start.astype(np.int64),
            ranks=self.ranks.first_stage[replica],
            holder=self.parts.holder,
            offset=self.parts.offset,
            granule=self.parts.granule,
        )

    def _placement(self, costs: NDArray[np.float64], home: Ints) -> Placement:
        """Place the items of each scope separately, on the ranks of the scope."""
        dep = self.config.dep
        alone = np.ones(len(home), np.int64)
        if dep.placement == "colocated" or dep.assign == "owner":
            return Placement(home, alone)
        rank, parts = home.copy(), alone
        for ranks in self.scopes:
            items = np.flatnonzero(np.isin(home, ranks))
            if dep.assign == "round_robin":
                rank[items] = ranks[round_robin(costs[items], len(ranks))]
                continue
            near = Places(self.ranks.replica[ranks], self.ranks.node[ranks])
            homes = np.searchsorted(ranks, home[items])
            wanted = choose_splits(
                costs[items], len(ranks), dep.max_split, dep.split_efficiency, near
            )
            found = place(costs[items], wanted, homes, near, dep.split_efficiency)
            rank[items], parts[items] = ranks[found.rank], found.parts
        return Placement(rank, parts)
