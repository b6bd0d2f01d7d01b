"""Plans the vision work of a step into bubbles: costs, scopes and memory. Pure function.

Each scope (`dep.scope`) places its own items on its own ranks. All scopes use one timeline of the
text-only pipeline, so that the combined plan is free of deadlocks, like each plan; `bubble_check`
simulates them together. Items that several ranks encode stay before and after the pipeline.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.plan.step_plan import GlobalPlan
from kimi_pretrain.config import GIB, ITEMSIZE, Config
from kimi_pretrain.dep.bubble_check import WaitsInACircle, check
from kimi_pretrain.dep.bubble_plan import (
    BubblePlan,
    Choice,
    Filling,
    Units,
    assign_units,
    choose,
    gaps_of,
    least_waits,
    most_joined,
    place_units,
)
from kimi_pretrain.dep.bubble_times import Learned
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP
from kimi_pretrain.dep.pass_costs import BACKWARD, pass_seconds
from kimi_pretrain.dep.step_bubbles import StepBubbles
from kimi_pretrain.dep.timeline import Schedule, Timeline, gathered, timeline
from kimi_pretrain.dep.vision_plan import Destinations, grids_of
from kimi_pretrain.parallel.ranks import Ranks
from moonvit3d.geometry import MERGE
from moonvit3d.memory import activation_bytes, begin_bytes, kept_bytes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

log = logging.getLogger("kimi_pretrain.train")

NOTHING = 1e-9  # seconds of an absent pass


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
            room_bytes=_limit(config) if dep.keep_activations == "auto" else 0,
        )
        per_stage = layout.dp * layout.cp * layout.tp
        self.stage = np.arange(layout.world_size()) // per_stage
        self.configured = Learned(*pass_seconds(config))

    def plan(
        self,
        plan: GlobalPlan,
        items: Ints,
        where: Destinations,
        costs: Floats,
        learned: Learned | None = None,
    ) -> StepBubbles:
        """Assign items to ranks and slots, and keep activations as far as memory allows.

        Args:
            plan: plan of the step.
            items: items that a single rank encodes.
            where: destinations of all items of the step.
            costs: seconds of a step's work on each item of the step.
            learned: measured costs for the slots; None: the configured costs. The assignment of
                items to ranks ignores measurements, because it determines the order of sums.

        Raises:
            WaitsInACircle: ranks would wait for each other; an internal error.
        """
        layout, per_microbatch = self.config.layout, self.config.train.rows_per_microbatch
        schedule = Schedule(layout.pp, layout.vpp, plan.num_rows // (layout.dp * per_microbatch))
        home = plan.items.row.astype(np.int64) // (plan.num_rows // layout.dp)
        units, unit = self._units(items, home, where.microbatch, plan, costs)
        held = self._held(items, home, unit, plan)
        rank, kept, waits = self._chosen(units, schedule, held)
        now, scaled = learned or self.configured, units
        if learned is not None:
            scaled = units.times(learned.factors)
        line = self._timelines(schedule, now, scaled)[waits]
        found = self._placed(scaled, rank, kept, schedule, line)
        rooms = [
            {gap.slot: gap.end - gap.begin for gap in gaps_of(stage, line, self.filling)[1:-1]}
            for stage in range(schedule.stages)
        ]
        needed = self._needed(rank, kept, held, units)
        return StepBubbles(found, units, unit, rooms, needed, now.factors)

    def _timelines(self, schedule: Schedule, costs: Learned, units: Units) -> list[Timeline]:
        """Return the timelines of all passes. Unless work runs only at the edges, there is one for
        each candidate length of waits; shorter waits are merged.
        """
        line = timeline(schedule, costs.forward, costs.backward)
        if self.filling.edges:
            return [line]
        return [gathered(schedule, line, least) for least in least_waits(units, self.filling)]

    def _units(
        self, items: Ints, home: Ints, microbatch: Ints, plan: GlobalPlan, costs: Floats
    ) -> tuple[Units, Ints]:
        """Return the items as units with the costs of their three passes, and the unit of each item
        of the step; -1: none.

        A frozen encoder has no backward work. With a frozen tower only the projector has some,
        which is close to zero.
        """
        frozen, size = self.config.train.frozen, ITEMSIZE[self.config.train.dtype]
        forward, vision = costs[items] / FORWARDS_PER_STEP, self.config.model.vision
        trained = "vision_tower" not in frozen
        later = forward if trained else np.full(len(forward), NOTHING)
        patches = plan.items.patches.astype(np.int64)[items]
        each = Units(
            home=home[items],
            microbatch=microbatch[items],
            forward=np.maximum(forward, NOTHING),
            again=np.maximum((1 + BACKWARD) * later, NOTHING),
            backward=np.maximum(BACKWARD * later, NOTHING),
            kept_bytes=kept_bytes(patches, vision, size),
        )
        unit = np.full(len(home), -1)
        most = most_joined(int(patches.sum()), len(self.stage))
        most = min(most, self.config.dep.max_patches_per_chunk)
        units, unit[items] = each.joined(patches, most)
        return units, unit

    def _held(self, items: Ints, home: Ints, unit: Ints, plan: GlobalPlan) -> "_Held":
        """Return the memory of the units; arguments and `unit` are those of `_units`."""
        vision, frozen = self.config.model.vision, self.config.train.frozen
        size, grids = ITEMSIZE[self.config.train.dtype], grids_of(plan)[items]
        patches = plan.items.patches.astype(np.int64)[items]
        tokens = plan.items.tokens.astype(np.int64)
        work = activation_bytes(grids, vision.replace(depth=1), size)
        begin = begin_bytes(patches, vision, size)
        if "vision_tower" in frozen:  # the tower's output, if the projector is trained on it
            begin = MERGE**2 * vision.width * size * tokens[items] * ("projector" not in frozen)

        def of_units(column: Ints) -> Ints:
            return np.bincount(unit[items], column).astype(np.int64)

        need = np.bincount(home, tokens, self.config.layout.dp).astype(np.int64)
        return _Held(of_units(begin), of_units(work), of_units(tokens[items]), need)

    def _chosen(self, units: Units, schedule: Schedule, held: "_Held") -> tuple[Ints, Ints, int]:
        """Return the rank of each unit, the number of its kept pieces, and the index of the
        timeline with the shortest step whose media fit the memory.
        """
        lines, room = self._timelines(schedule, self.configured, units), 0

        def attempt(number: int, taken: Floats) -> Choice:
            nonlocal room
            # Start from the previous result, or each call takes several rounds.
            room = room or self.filling.room_bytes
            choice, room, over = self._fitting(units, schedule, lines[number], held, room, taken)
            return choice._replace(longer=math.inf) if over else choice

        number, choice = choose(attempt, len(lines), schedule.stages)
        return choice.rank, choice.kept, number

    def _fitting(
        self,
        units: Units,
        schedule: Schedule,
        line: Timeline,
        held: "_Held",
        room: int,
        taken: Floats,
    ) -> tuple[Choice, int, bool]:
        """Return the assignment with as many kept pieces as memory allows, the bytes of a rank that
        were available for them, and whether media exceed the limit even so.

        Args:
            room: bytes for kept pieces to start with; reduced until everything fits.
            taken: as in `assign_units`.
        """
        limit = self.filling.room_bytes
        while True:
            found = self._assigned(units, schedule, line, room, taken)
            needed = self._needed(found.rank, found.kept, held, units)
            over = max(0, int(needed.max()) - limit)
            if not over or not room:
                return found, room, bool(over and limit)
            room = max(0, room - over - limit // 256)  # a margin avoids several more rounds

    def _assigned(
        self, units: Units, schedule: Schedule, line: Timeline, room: int, taken: Floats
    ) -> Choice:
        """Assign the units of each scope to its own ranks."""
        rank, kept = np.zeros(len(units), np.int64), np.zeros(len(units), np.int64)
        longer, late = [], []
        filling = replace(self.filling, room_bytes=room)
        for ranks in self.scopes:
            mine = np.flatnonzero(np.isin(units.home, self.ranks.replica[ranks]))
            part = Units(*(column[mine] for column in vars(units).values()))
            found = assign_units(part, schedule, line, self.stage[ranks], filling, taken)
            rank[mine], kept[mine] = ranks[found.rank], found.kept
            longer.append(found.longer)
            late.append(found.late)
        return Choice(rank, kept, max(longer), np.mean(late, axis=0))

    def _placed(
        self,
        units: Units,
        rank: Ints,
        kept: Ints,
        schedule: Schedule,
        line: Timeline,
    ) -> BubblePlan:
        """Place all units in slots and return the plan, which has passed `check`."""
        found = place_units(units, rank, kept, schedule, line, self.stage, self.filling)
        try:
            check(found)
        except WaitsInACircle as error:
            # The timeline does not model that a send waits for its receiver.
            log.warning("dep.bubbles: a step uses its first and last slots alone: %s", error)
            filling = replace(self.filling, edges=True)
            found = place_units(units, rank, kept, schedule, line, self.stage, filling)
            check(found)
        return found

    def _needed(self, rank: Ints, kept: Ints, held: "_Held", units: Units) -> Ints:
        """Return the bytes that media need on each rank if all waiting work waits at once.

        A rank may postpone backward work, so the plan does not bound the amount of waiting work.

        Args:
            rank, kept: rank of each unit and the number of its kept pieces.
        """
        count = len(self.stage)
        piece = -(-units.kept_bytes // self.filling.pieces)
        waits = np.bincount(rank, held.begin + kept * piece, count)
        work = np.zeros(count)
        np.maximum.at(work, rank, held.work)
        moved = np.bincount(rank, held.tokens, count).astype(np.int64)
        first = self.ranks.first_stage
        moved[first] += -(-held.need[:, None] // first.shape[1])  # each rank holds part of the rows
        size = self.config.model.vision.out_width * ITEMSIZE[self.config.train.dtype]
        return np.ceil(waits + work + 2 * moved * size).astype(np.int64)


def _limit(config: Config) -> int:
    """Return the bytes that media may use on each rank."""
    assert config.dep.memory_limit_gib is not None  # checked with the configuration
    return int(config.dep.memory_limit_gib * GIB)


class _Held(NamedTuple):
    """Memory of units besides their kept activations.

    Attributes:
        begin: bytes of the inputs of their pieces, held from the forward pass on, [units].
        work: bytes while a piece is recomputed and runs its backward pass, [units].
        tokens: tokens of each unit, [units].
        need: tokens of all items of each replica, including shared items.
    """

    begin: Ints
    work: Ints
    tokens: Ints
    need: Ints
