"""A step's vision work in bubbles: the plan, and what was believed when it was made. Pure."""

from dataclasses import dataclass

from kimi_pretrain.dep.bubble_plan import BubblePlan, Units

MEASURED = FILLED, WASTED, OVERRUN = "filled", "wasted", "overrun"
"""What a rank measures, in seconds: vision work in slots; waiting with nothing to do; work between
two passes beyond what the plan has there."""
WAIT = "4 wait"
"""How a timeline names the waiting; work has the names of its phases."""


@dataclass(frozen=True)
class StepBubbles:
    """Part of a `VisionPlan`.

    Attributes:
        plan: who does what when.
        units: what a unit is, and what it should cost.
        room: of each stage: slot between two passes -> seconds that it should last.
    """

    plan: BubblePlan
    units: Units
    room: list[dict[int, float]]

    def seconds(self, unit: int, piece: int) -> float:
        """Return what a piece behind a unit's forward pass should take."""
        again = not self.plan.kept[unit] and piece < self.plan.pieces
        passes = self.units.recompute if again else self.units.backward
        return float(passes[unit]) / self.plan.pieces
