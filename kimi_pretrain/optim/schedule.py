"""Learning rate as a function of the step alone, so that a resumed run has nothing to remember.

Every schedule is a list of segments (`recipes.py`): warm-up, stable stretch and decay (K2,
arXiv:2507.20534, 2.5) are three of them. Positions are counted in tokens seen up to and including
the step, as whole numbers, so borders are exact: the step that reaches the end of a segment has
exactly the segment's rate.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.recipes import RECIPES, Segment, Shape

# Part of the way that is still to go after a part `done` of the segment; exactly 0 after all of it.
_LEFT: dict[Shape, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 0.0,
}


@dataclass(frozen=True)
class Stretch:
    """A segment in its place.

    Attributes:
        start: tokens seen before it.
        end: tokens seen with it; equal to start where the segment only sets a rate.
    """

    start: int
    end: int
    begin_lr: float
    segment: Segment

    def rate(self, seen: int) -> float:
        """Return the learning rate after `seen` tokens, start < seen <= end."""
        left = _LEFT[self.segment.shape]((seen - self.start) / (self.end - self.start))
        return self.segment.lr + (self.begin_lr - self.segment.lr) * left


def segments(config: OptimConfig) -> Sequence[Segment]:
    """Return the schedule as segments: those given, a recipe's, or warm-up, stable and decay."""
    if isinstance(config.schedule, str):
        return RECIPES[config.schedule]
    if config.schedule is not None:
        return config.schedule
    peak = config.lr or 0.0
    ramp = [
        Segment(steps=config.warmup_steps, lr=peak, shape="linear"),
        Segment(steps=config.stable_steps, lr=peak, shape="constant"),
    ]
    if config.decay_steps:  # without it the rate stays at its peak for ever
        last = Segment(steps=config.decay_steps, lr=config.min_lr or 0.0, shape=config.decay)
        ramp.append(last)
    return ramp


def stretches(config: OptimConfig, tokens_per_step: int) -> list[Stretch]:
    """Return the segments of a schedule in their places.

    Args:
        tokens_per_step: tokens of a global batch, the same throughout the run.

    Raises:
        ValueError: a segment would end before the one before it does, or a batch has no tokens.
    """
    if tokens_per_step < 1:
        raise ValueError(f"schedule: tokens_per_step must be at least 1, got {tokens_per_step}")
    found, start, rate = [], 0, 0.0
    for segment in segments(config):
        end = segment.end(start, tokens_per_step)
        found.append(Stretch(start, end, rate, segment))
        start, rate = end, segment.lr
    return found


def learning_rate(step: int, config: OptimConfig, tokens_per_step: int) -> float:
    """Learning rate of one update, before a parameter group's own scale.

    Args:
        step: updates done before this one; the first update is step 0.
        tokens_per_step: tokens of a global batch. The position in tokens is (step + 1) times this:
            of a run whose batch changes under way, only segments in steps keep their places.

    Returns:
        The rate of the segment in which this step ends; the last segment's own for ever after it.

    Raises:
        ValueError: step is negative; see also `stretches`.
    """
    if step < 0:
        raise ValueError(f"learning rate asked for step {step}; steps count from 0")
    seen = (step + 1) * tokens_per_step
    placed = stretches(config, tokens_per_step)
    for stretch in placed:
        if stretch.start < seen <= stretch.end:
            return stretch.rate(seen)
    return placed[-1].segment.lr


def total_steps(config: OptimConfig, tokens_per_step: int) -> int:
    """Return the steps until the rate rests; the last of them has the last segment's rate."""
    return math.ceil(stretches(config, tokens_per_step)[-1].end / tokens_per_step)


def describe_schedule(config: OptimConfig, tokens_per_step: int) -> str:
    """Return one line that says where each segment lies, in steps, and what it does.

    Raises:
        ValueError: as `stretches`.
    """
    told = []
    for stretch in stretches(config, tokens_per_step):
        if stretch.end > stretch.start:
            last, segment = math.ceil(stretch.end / tokens_per_step), stretch.segment
            came_from = "" if segment.shape == "constant" else f"{stretch.begin_lr:g} to "
            told.append(f"{came_from}{segment.lr:g} ({segment.shape}) until step {last:,}")
    rest = f"then {stretches(config, tokens_per_step)[-1].segment.lr:g}"
    return "learning rate: " + ", ".join([*told, rest])
