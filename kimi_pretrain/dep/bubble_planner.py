"""From the plan of a step to its vision work in bubbles: costs, scopes and memory. Pure.

Each scope (`dep.scope`) places its own items on its own ranks, all on one timeline of the pipeline
with text alone, so that the plans together are free of circles as each is; `bubble_check` runs them
through together. Items that several ranks encode stay before and after the pipeline.
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
        """Place items on ranks and slots, and keep activations where there is room.

        Args:
            plan: of the step.
            items: that one rank each is to encode.
            where: all items of the step are needed.
            costs: seconds of a step's work on each of them.
            learned: costs that slots are planned with; who encodes what never follows them, because
                the order of sums does. None: the configuration's.

        Raises:
            WaitsInACircle: a plan in which ranks would wait for each other; an error of ours.
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
        """Return when passes run; unless work is at the edges alone short waits lie together, for
        each length that they could have.
        """
        line = timeline(schedule, costs.forward, costs.backward)
        if self.filling.edges:
            return [line]
        return [gathered(schedule, line, least) for least in least_waits(units, self.filling)]

    def _units(
        self, items: Ints, home: Ints, microbatch: Ints, plan: GlobalPlan, costs: Floats
    ) -> tuple[Units, Ints]:
        """Return some items as units, with what each of their three passes costs, and the unit of
        each item of the step; -1: none.

        A frozen encoder has no later passes; behind a frozen tower they are the projector's, which
        is next to nothing.
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
        """Return what units take; the arguments as of `_units`, `unit` as it returns it."""
        vision, frozen = self.config.model.vision, self.config.train.frozen
        size, grids = ITEMSIZE[self.config.train.dtype], grids_of(plan)[items]
        patches = plan.items.patches.astype(np.int64)[items]
        tokens = plan.items.tokens.astype(np.int64)
        work = activation_bytes(grids, vision.replace(depth=1), size)
        begin = begin_bytes(patches, vision, size)
        if "vision_tower" in frozen:  # what it put out, where a projector is trained on it
            begin = MERGE**2 * vision.width * size * tokens[items] * ("projector" not in frozen)

        def of_units(column: Ints) -> Ints:
            return np.bincount(unit[items], column).astype(np.int64)

        need = np.bincount(home, tokens, self.config.layout.dp).astype(np.int64)
        return _Held(of_units(begin), of_units(work), of_units(tokens[items]), need)

    def _chosen(self, units: Units, schedule: Schedule, held: "_Held") -> tuple[Ints, Ints, int]:
        """Return the rank of each unit, how many of its pieces are kept, and the number of the
        timeline: of that on which media fit the memory, and the step is shortest.
        """
        lines, room = self._timelines(schedule, self.configured, units), 0

        def attempt(number: int, taken: Floats) -> Choice:
            nonlocal room
            # What the last one came to, or it takes several rounds each time.
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
        """Return who does what, with no more pieces kept than there is room for; the bytes of a
        rank that were left for those; and whether media are over the limit even so.

        Args:
            room: bytes to begin with; taken back until all fits.
            taken: as for `assign_units`.
        """
        limit = self.filling.room_bytes
        while True:
            found = self._assigned(units, schedule, line, room, taken)
            needed = self._needed(found.rank, found.kept, held, units)
            over = max(0, int(needed.max()) - limit)
            if not over or not room:
                return found, room, bool(over and limit)
            room = max(0, room - over - limit // 256)  # a little more, or it takes several rounds

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
        """Give all units their slots; returns a plan that has been checked."""
        found = place_units(units, rank, kept, schedule, line, self.stage, self.filling)
        try:
            check(found)
        except WaitsInACircle as error:
            # The timeline does not know that what a stage sends waits for its taker.
            log.warning("dep.bubbles: a step uses its first and last slots alone: %s", error)
            filling = replace(self.filling, edges=True)
            found = place_units(units, rank, kept, schedule, line, self.stage, filling)
            check(found)
        return found

    def _needed(self, rank: Ints, kept: Ints, held: "_Held", units: Units) -> Ints:
        """Return the bytes that media take on each rank, were all that waits there at once.

        A rank may put backward work off by itself: it is not the plan that says how much waits.

        Args:
            rank, kept: of each unit; `kept`: how many of its pieces are.
        """
        count = len(self.stage)
        piece = -(-units.kept_bytes // self.filling.pieces)
        waits = np.bincount(rank, held.begin + kept * piece, count)
        work = np.zeros(count)
        np.maximum.at(work, rank, held.work)
        moved = np.bincount(rank, held.tokens, count).astype(np.int64)
        first = self.ranks.first_stage
        moved[first] += -(-held.need[:, None] // first.shape[1])  # each holds its part of the rows
        size = self.config.model.vision.out_width * ITEMSIZE[self.config.train.dtype]
        return np.ceil(waits + work + 2 * moved * size).astype(np.int64)


def _limit(config: Config) -> int:
    """Return the bytes that media may take on each rank."""
    assert config.dep.memory_limit_gib is not None  # checked with the configuration
    return int(config.dep.memory_limit_gib * GIB)


class _Held(NamedTuple):
    """What units take beside what is kept of them.

    Attributes:
        begin: bytes of what their pieces begin with, from the forward pass on, [units].
        work: bytes while a piece is computed and taken back, [units].
        tokens: of each, [units].
        need: tokens of all items of each replica, shared ones, too.
    """

    begin: Ints
    work: Ints
    tokens: Ints
    need: Ints
