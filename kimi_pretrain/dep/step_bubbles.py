"""A step's vision work in bubbles: the plan, and what was believed when it was made. Pure."""

from dataclasses import dataclass

import numpy as np

from kimi_pretrain.dep.bubble_plan import BubblePlan, Ints, Units

MEASURED = FILLED, WASTED, OVERRUN = "filled", "wasted", "overrun"
"""What a rank measures, in seconds: vision work in slots; waiting with nothing to do; work between
two passes beyond what the plan has there."""
WAIT = "4 wait"
"""How a timeline names the waiting; work has the names of its phases."""

KINDS = "forward", "again", "backward"
"""Pieces of an item's work: of its forward pass, of its backward pass that are computed again, and
of its backward pass whose activations are kept."""


@dataclass(frozen=True)
class StepBubbles:
    """Part of a `VisionPlan`.

    Attributes:
        plan: who does what when.
        units: what they cost by the cost model.
        unit: of each item of the step, [items]; -1: it stays before and after the pipeline.
        room: of each stage: slot between two passes -> seconds that it should last.
        needed: bytes that media take on each rank, [ranks], but for shared items.
        factors: of the cost model's seconds of each of `KINDS`, by which the slots were planned.
    """

    plan: BubblePlan
    units: Units
    unit: Ints
    room: list[dict[int, float]]
    needed: Ints
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def items(self, unit: int) -> list[int]:
        """Return the items of a unit, rising: so their patches and tokens lie in it."""
        found: list[int] = np.flatnonzero(self.unit == unit).tolist()
        return found

    def begins(self, tokens: Ints) -> Ints:
        """Return at which token of its unit each item begins, [items]; `tokens`: of each."""
        order = np.argsort(self.unit, kind="stable")
        before = np.cumsum(tokens[order]) - tokens[order]
        first = np.flatnonzero(np.diff(self.unit[order], prepend=-2))
        sizes = np.diff(np.append(first, len(order)))
        found = np.empty(len(order), np.int64)
        found[order] = before - np.repeat(before[first], sizes)
        return found

    def kind(self, unit: int, piece: int) -> int:
        """Return which of `KINDS` a piece of a unit's backward pass is."""
        return 2 if piece < self.plan.kept[unit] else 1

    def modelled(self, unit: int, kind: int) -> float:
        """Return the seconds that the cost model has for a piece."""
        units = self.units
        passes = (units.forward, units.again, units.backward)[kind]
        return float(passes[unit]) / self.plan.pieces

    def seconds(self, unit: int, piece: int) -> float:
        """Return what a piece of a unit's backward pass should take."""
        kind = self.kind(unit, piece)
        return self.modelled(unit, kind) * self.factors[kind]
