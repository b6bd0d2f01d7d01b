"""A step's vision work in bubbles: the plan and the cost estimates behind it. Pure."""

from dataclasses import dataclass

import numpy as np

from kimi_pretrain.dep.bubble_plan import BubblePlan, Ints, Units

MEASURED = FILLED, WASTED, OVERRUN = "filled", "wasted", "overrun"
"""Kinds of measured seconds on a rank: vision work in slots, idle waits, and work between two
passes beyond the planned time."""
WAIT = "4 wait"
"""Name of waits in a timeline; work has the name of its phase."""

KINDS = "forward", "again", "backward"
"""Kinds of pieces of an item: of its forward pass, of its backward pass with recompute, and of its
backward pass with kept activations."""


@dataclass(frozen=True)
class StepBubbles:
    """Bubble part of a `VisionPlan`.

    Attributes:
        plan: assignment of the units to ranks and slots.
        units: the units, with their costs by the cost model.
        unit: unit of each item of the step, [items]; -1: encoded before and after the pipeline.
        room: for each stage, slot between two passes -> its planned seconds.
        needed: bytes that media need on each rank, excluding shared items, [ranks].
        factors: factors on the cost model's seconds for each of `KINDS`, used to plan the slots.
    """

    plan: BubblePlan
    units: Units
    unit: Ints
    room: list[dict[int, float]]
    needed: Ints
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def items(self, unit: int) -> list[int]:
        """Return the items of a unit in rising order, the order of their patches and tokens."""
        found: list[int] = np.flatnonzero(self.unit == unit).tolist()
        return found

    def begins(self, tokens: Ints) -> Ints:
        """Return the index of each item's first token in its unit, [items], given token counts."""
        order = np.argsort(self.unit, kind="stable")
        before = np.cumsum(tokens[order]) - tokens[order]
        first = np.flatnonzero(np.diff(self.unit[order], prepend=-2))
        sizes = np.diff(np.append(first, len(order)))
        found = np.empty(len(order), np.int64)
        found[order] = before - np.repeat(before[first], sizes)
        return found

    def kind(self, unit: int, piece: int) -> int:
        """Return the index in `KINDS` of a piece of a unit's backward pass."""
        return 2 if piece < self.plan.kept[unit] else 1

    def modelled(self, unit: int, kind: int) -> float:
        """Return the seconds of a piece by the cost model."""
        units = self.units
        passes = (units.forward, units.again, units.backward)[kind]
        return float(passes[unit]) / self.plan.pieces

    def seconds(self, unit: int, piece: int) -> float:
        """Return the planned seconds of a piece of a unit's backward pass."""
        kind = self.kind(unit, piece)
        return self.modelled(unit, kind) * self.factors[kind]
