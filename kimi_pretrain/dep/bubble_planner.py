"""From the plan of a step to its vision work in bubbles: costs, scopes and memory. Pure.

Each scope (`dep.scope`) places its own items on its own ranks, all on one timeline of the pipeline
with text alone, so that the plans together are free of circles as each is; `bubble_check` runs them
through together. Items that several ranks encode stay before and after the pipeline.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from data_pipeline.plan.step_plan import GlobalPlan
from kimi_pretrain.config import GIB, ITEMSIZE, Config
from kimi_pretrain.dep.bubble_check import WaitsInACircle, check
from kimi_pretrain.dep.bubble_plan import (
    BubblePlan,
    Filling,
    Slice,
    Units,
    gaps_of,
    least_wait,
    plan_bubbles,
)
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP
from kimi_pretrain.dep.pass_costs import BACKWARD, pass_seconds
from kimi_pretrain.dep.step_bubbles import StepBubbles
from kimi_pretrain.dep.timeline import Schedule, Timeline, gathered, timeline
from kimi_pretrain.dep.vision_plan import Destinations, grids_of
from kimi_pretrain.parallel.ranks import Ranks
from moonvit3d.memory import activation_bytes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

log = logging.getLogger("kimi_pretrain.train")

NOTHING = 1e-9  # seconds of a pass that is not there


class BubblePlanner:
    """Plans vision work into the bubbles of a run's pipeline.

    Args:
        scopes: ranks of each group that shares its media.
    """

    def __init__(self, config: Config, ranks: Ranks, scopes: Sequence[Ints]):
        self.config, self.ranks, self.scopes = config, ranks, scopes
        dep, layout = config.dep, config.layout
        self.filling = Filling(
            margin=1.0 / dep.bubble_fill,
            pieces=config.model.vision.depth,
            edges=dep.bubbles == "edges",
        )
        per_stage = layout.dp * layout.cp * layout.tp
        self.stage = np.arange(layout.world_size()) // per_stage
        self._passes = pass_seconds(config)
        self._line = cache(self._timeline)

    def plan(
        self, plan: GlobalPlan, items: Ints, where: Destinations, costs: Floats
    ) -> StepBubbles:
        """Place items on ranks and slots, and keep activations where there is room.

        Args:
            plan: of the step.
            items: that one rank each is to encode.
            where: all items of the step are needed.
            costs: seconds of a step's work on each of them.

        Raises:
            WaitsInACircle: a plan in which ranks would wait for each other; an error of ours.
        """
        layout, per_microbatch = self.config.layout, self.config.train.rows_per_microbatch
        schedule, line = self._line(plan.num_rows // (layout.dp * per_microbatch))
        home = plan.items.row.astype(np.int64) // (plan.num_rows // layout.dp)
        units = self._units(items, home, where.microbatch, grids_of(plan), costs)
        if not self.filling.edges:
            line = gathered(schedule, line, least_wait(units, self.filling))
        tokens = plan.items.tokens.astype(np.int64)
        need = np.bincount(home, tokens, layout.dp).astype(np.int64)  # shared items, too
        held = tokens[units.item], need
        found = self._fitting(units, schedule, line, held, self.filling)
        try:
            check(found)
        except WaitsInACircle as error:
            # The timeline does not know that what a stage sends waits for its taker.
            log.warning("dep.bubbles: a step uses its first and last slots alone: %s", error)
            filling = replace(self.filling, edges=True)
            found = self._fitting(units, schedule, line, held, filling)
            check(found)
        rooms = [
            {gap.slot: gap.end - gap.begin for gap in gaps_of(stage, line, self.filling)[1:-1]}
            for stage in range(schedule.stages)
        ]
        return StepBubbles(found, units, rooms)

    def _timeline(self, microbatches: int) -> tuple[Schedule, Timeline]:
        layout = self.config.layout
        schedule = Schedule(layout.pp, layout.vpp, microbatches)
        return schedule, timeline(schedule, *self._passes)

    def _units(
        self, items: Ints, home: Ints, microbatch: Ints, grids: Ints, costs: Floats
    ) -> Units:
        """Return some items as units, with what each of their three passes costs.

        A frozen encoder has no later passes; behind a frozen tower they are the projector's, which
        is next to nothing.
        """
        frozen, size = self.config.train.frozen, ITEMSIZE[self.config.train.dtype]
        forward = costs[items] / FORWARDS_PER_STEP
        trained = "vision_tower" not in frozen
        later = forward if trained else np.full(len(forward), NOTHING)
        return Units(
            item=items,
            home=home[items],
            microbatch=microbatch[items],
            forward=np.maximum(forward, NOTHING),
            recompute=np.maximum(later, NOTHING),
            backward=np.maximum(BACKWARD * later, NOTHING),
            kept_bytes=activation_bytes(grids[items], self.config.model.vision, size),
        ).ordered()

    def _fitting(
        self,
        units: Units,
        schedule: Schedule,
        line: Timeline,
        held: tuple[Ints, Ints],
        filling: Filling,
    ) -> BubblePlan:
        """Return a plan that keeps no more activations than there is room for; `held`: `_needed`'s
        tokens.
        """
        dep, limit = self.config.dep, 0
        if dep.keep_activations == "auto":
            assert dep.memory_limit_gib is not None  # checked with the configuration
            limit = int(dep.memory_limit_gib * GIB)
        room = limit
        while True:
            found = self._placed(units, schedule, line, replace(filling, room_bytes=room))
            over = self._needed(found, *held, units) - limit
            if over <= 0 or not room:
                return found
            room = max(0, room - over)

    def _placed(
        self, units: Units, schedule: Schedule, line: Timeline, filling: Filling
    ) -> BubblePlan:
        """Plan each scope, and put the plans together."""
        rank, kept = np.zeros(len(units), np.int64), np.zeros(len(units), np.bool_)
        forward: list[list[Slice]] = [[] for _ in self.stage]
        backward: list[list[Slice]] = [[] for _ in self.stage]
        upfront = after = 0.0
        for ranks in self.scopes:
            mine = np.flatnonzero(np.isin(units.home, self.ranks.replica[ranks]))
            part = Units(*(column[mine] for column in vars(units).values()))
            found = plan_bubbles(part, schedule, line, self.stage[ranks], filling)
            rank[mine], kept[mine] = ranks[found.rank], found.kept
            for place, one in enumerate(ranks.tolist()):
                for whole, slices in ((forward, found.forward), (backward, found.backward)):
                    whole[one] = [s._replace(unit=int(mine[s.unit])) for s in slices[place]]
            upfront, after = max(upfront, found.upfront), max(after, found.after)
        return BubblePlan(
            schedule, self.stage, units.microbatch, rank, kept, filling.pieces, forward, backward,
            upfront, after,
        )  # fmt: skip

    def _needed(self, plan: BubblePlan, tokens: Ints, need: Ints, units: Units) -> int:
        """Return the most bytes that media take on a rank, were all that is kept there at once.

        A rank may put backward work off by itself: it is not the plan that says how much is.

        Args:
            tokens: of each unit.
            need: tokens of all items of each replica.
        """
        count = len(plan.stage)
        kept = np.bincount(plan.rank[plan.kept], units.kept_bytes[plan.kept], count)
        again = np.zeros(count)
        np.maximum.at(again, plan.rank[~plan.kept], units.kept_bytes[~plan.kept])
        moved = np.bincount(plan.rank, tokens, count).astype(np.int64)
        first = self.ranks.first_stage
        moved[first] += -(-need[:, None] // first.shape[1])  # each holds its part of the rows
        size = self.config.model.vision.out_width * ITEMSIZE[self.config.train.dtype]
        return int(np.ceil(kept + again + 2 * moved * size).max(initial=0))
