"""Intervals of one predicted step: a lane for each pipeline stage of the slowest replica. Pure.

    vision before | hand-over | passes, bubbles, vision in bubbles | hand-back | vision behind | ...

A lane shows one rank: of the replica's ranks on the stage, the one with the most vision work. An
exchange, the gradient sums and the update block all ranks, so every lane shows the length of the
slowest rank. A rank waits where its lane has no interval.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from data_pipeline.plan.planner import GlobalPlan
from kimi_pretrain.dep.bubble_plan import Slice
from kimi_pretrain.dep.pass_costs import Floats
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.step_bubbles import StepBubbles
from kimi_pretrain.dep.timeline import Timeline
from kimi_pretrain.dep.vision_plan import Ints, VisionPlan, grids_of
from kimi_pretrain.tools.predict_step import StepPredictions
from kimi_pretrain.tools.step_parts import (
    StepSeconds,
    backbone_sum_seconds,
    encoder_sum_seconds,
    exchange_seconds,
    outside_bubbles,
    vision_phases,
)
from kimi_pretrain.tools.text_passes import Pipeline, text_pipeline

FORWARD, BACKWARD, BUBBLE = "forward", "backward", "bubble"
BEFORE, INSIDE, BEHIND = "vision before", "vision in bubbles", "vision behind"
OVER, BACK, SUM, UPDATE = "hand-over", "hand-back", "gradient sum", "update"
DATA, SAVE = "wait for data", "checkpoint"
KINDS = (DATA, BEFORE, OVER, FORWARD, BACKWARD, INSIDE, BUBBLE, BACK, BEHIND, SUM, UPDATE, SAVE)
NOTHING = 1e-8  # seconds; shorter intervals are dropped


@dataclass(frozen=True)
class Interval:
    """One activity of a rank; begin and end in seconds since the step began.

    Attributes:
        kind: one of `KINDS`.
        chunk, microbatch: of a pass; None for other kinds.
    """

    kind: str
    begin: float
    end: float
    chunk: int | None = None
    microbatch: int | None = None


@dataclass(frozen=True)
class Lane:
    """The activities of one rank of a stage, in time order."""

    stage: int
    rank: int
    intervals: tuple[Interval, ...]


@dataclass(frozen=True)
class StepLanes:
    """A predicted step: its number in the run, from 1, and its slowest replica."""

    step: int
    replica: int
    seconds: StepSeconds
    lanes: tuple[Lane, ...]


def slowest_step(found: StepPredictions, plans: Sequence[GlobalPlan]) -> StepLanes:
    """Return the lanes of the slowest predicted step.

    Args:
        plans: of the predicted steps.
    """
    number = int(np.argmax([step.total for step in found.steps]))
    plan, config, traffic = plans[number], found.config, found.traffic
    vision = VisionPlanner(config).plan(plan)
    pipeline = text_pipeline(config, traffic)
    drawn = _Drawn(found, found.steps[number], pipeline, vision, grids_of(plan))
    return StepLanes(plan.step + 1, drawn.replica, drawn.seconds, tuple(drawn.lanes()))


class _Drawn:
    """One step, and the ranks that its lanes show."""

    def __init__(
        self,
        found: StepPredictions,
        seconds: StepSeconds,
        pipeline: Pipeline,
        vision: VisionPlan,
        grids: Ints,
    ):
        config, traffic = found.config, found.traffic
        outside = outside_bubbles(vision)
        self.seconds, self.pipeline, self.inside = seconds, pipeline, vision.bubbles
        self.forward, self.later = vision_phases(config, outside, grids)
        self.over, self.back = exchange_seconds(config, outside, traffic)
        self.sums = backbone_sum_seconds(config, traffic)
        self.encoder_sum = encoder_sum_seconds(config, vision, traffic.network)
        layout = config.layout
        work = (self.forward + self.later + self._in_slots()).reshape(layout.pp, layout.dp, -1)
        self.replica = int(work.max(axis=(0, 2)).argmax())
        ranks = np.arange(work.size).reshape(work.shape)[:, self.replica]
        busiest = work[:, self.replica].argmax(axis=1)
        self.ranks: list[int] = ranks[np.arange(layout.pp), busiest].tolist()
        self.line = self._line(ranks.tolist())

    def _in_slots(self) -> Floats:
        """Return the seconds of each rank's work in slots of the pipeline, [ranks]."""
        if self.inside is None:
            return np.zeros(len(self.forward))
        each = [_slots(self.inside, rank) for rank in range(len(self.forward))]
        return np.array([sum(slots.values()) for slots in each])

    def _line(self, ranks: list[list[int]]) -> Timeline:
        """Return the timeline in which each pass waits for its stage's vision work in its slot."""
        plain = self.pipeline.line()
        if self.inside is None:
            return plain
        before = np.zeros_like(plain.start)
        for stage, sharing in enumerate(ranks):
            for rank in sharing:
                for slot, seconds in _slots(self.inside, rank).items():
                    if slot < self.pipeline.schedule.num_passes:
                        before[stage, slot] = max(before[stage, slot], seconds)
        before[:, 0] = np.maximum(0.0, before[:, 0] - self.inside.plan.upfront)
        return self.pipeline.line(before)

    def lanes(self) -> Iterator[Lane]:
        """Yield the lane of each stage."""
        data = self.seconds.loader
        first = data + float(self.forward.max(initial=0.0)) + self.over
        if self.inside is not None:
            first += self.inside.plan.upfront
        last = first + self.line.total
        after = 0.0 if self.inside is None else self.inside.plan.after
        behind = last + after + self.back
        sums = behind + float(self.later.max(initial=0.0))
        update = sums + float(self.sums.max()) + self.encoder_sum
        save = update + self.seconds.update
        for stage, rank in enumerate(self.ranks):
            upfront = first - (0.0 if self.inside is None else self.inside.plan.upfront)
            found = [
                Interval(DATA, 0.0, data),
                Interval(BEFORE, data, data + float(self.forward[rank])),
                Interval(OVER, upfront - self.over, upfront),
                *self._passes(stage, rank, upfront, first, last),
                Interval(BACK, behind - self.back, behind),
                Interval(BEHIND, behind, behind + float(self.later[rank])),
                Interval(SUM, sums, sums + float(self.sums[stage]) + self.encoder_sum),
                Interval(UPDATE, update, save),
                Interval(SAVE, save, save + self.seconds.checkpoint),
            ]
            some = (one for one in found if one.end - one.begin > NOTHING)
            yield Lane(stage, rank, tuple(some))

    def _passes(
        self, stage: int, rank: int, upfront: float, first: float, last: float
    ) -> Iterator[Interval]:
        """Yield the passes and the intervals before, between and after them.

        Args:
            upfront: earliest start of work in the first slot.
            first, last: start and end of the pipeline.
        """
        slots = {} if self.inside is None else _slots(self.inside, rank)
        start, end = first + self.line.start[stage], first + self.line.end[stage]
        borders = [upfront, *end.tolist()]
        for number, this in enumerate(self.pipeline.schedule.passes[stage]):
            begin, until = borders[number], float(start[number])
            yield from _slot(begin, until, slots.get(number, 0.0), first, last)
            kind = BACKWARD if this.backward else FORWARD
            yield Interval(kind, until, float(end[number]), this.chunk, this.microbatch)
        behind = slots.get(len(start), 0.0)
        yield from _slot(borders[-1], last, behind, first, last)


def _slot(begin: float, until: float, work: float, first: float, last: float) -> Iterator[Interval]:
    """Yield the vision work of a slot and the remaining bubble.

    Args:
        begin, until: start and end of the slot.
        work: seconds of vision work from the start of the slot; after the last pass they may exceed
            the slot.
        first, last: start and end of the pipeline; work outside them is in no bubble.
    """
    end = begin + work
    yield Interval(BEFORE, begin, min(end, first))
    yield Interval(INSIDE, max(begin, first), min(end, last))
    yield Interval(BEHIND, max(begin, last), end)
    yield Interval(BUBBLE, max(end, begin, first), until)


def _slots(inside: StepBubbles, rank: int) -> dict[int, float]:
    """Return slot -> seconds of a rank's work in it; slots without work are left out."""
    pieces = [
        *((one, _forward_seconds(inside, one)) for one in inside.plan.forward[rank]),
        *((one, _later_seconds(inside, one)) for one in inside.plan.backward[rank]),
    ]
    found = dict[int, float]()
    for one, seconds in pieces:
        found[one.slot] = found.get(one.slot, 0.0) + seconds
    return found


def _forward_seconds(inside: StepBubbles, one: Slice) -> float:
    return (one.end - one.begin) * inside.modelled(one.unit, 0) * inside.factors[0]


def _later_seconds(inside: StepBubbles, one: Slice) -> float:
    return sum(inside.seconds(one.unit, piece) for piece in range(one.begin, one.end))


def as_json(found: StepLanes) -> dict[str, Any]:
    """Return the lanes as plain values; only passes have chunk and microbatch."""
    lanes = [
        {
            "stage": lane.stage,
            "rank": lane.rank,
            "intervals": [
                {name: value for name, value in asdict(one).items() if value is not None}
                for one in lane.intervals
            ],
        }
        for lane in found.lanes
    ]
    return {"step": found.step, "replica": found.replica, "lanes": lanes}
