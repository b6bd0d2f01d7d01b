"""Computes the learning rate from the step alone, so that a resume needs no schedule state.

Every schedule is a list of segments (`recipes.py`), for example warm-up, stable phase and decay
(K2, arXiv:2507.20534, 2.5). Positions are whole numbers of tokens up to and including the step, so
borders are exact: the step that reaches the end of a segment has exactly the segment's rate.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.recipes import RECIPES, Segment, Shape

# Remaining fraction of the change after a fraction `done` of the segment; exactly 0 at its end.
_LEFT: dict[Shape, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 0.0,
}


@dataclass(frozen=True)
class Stretch:
    """A segment with its position in the schedule.

    Attributes:
        start: tokens seen before the segment.
        end: tokens seen at its end; equal to `start` if the segment only sets a rate.
        begin_lr: learning rate at the end of the previous segment.
        segment: the segment.
    """

    start: int
    end: int
    begin_lr: float
    segment: Segment

    def rate(self, seen: int) -> float:
        """Return the learning rate after `seen` tokens, where start < seen <= end."""
        left = _LEFT[self.segment.shape]((seen - self.start) / (self.end - self.start))
        return self.segment.lr + (self.begin_lr - self.segment.lr) * left


def segments(config: OptimConfig) -> Sequence[Segment]:
    """Return the segments: as listed, from a recipe, or warm-up, stable phase and decay."""
    if isinstance(config.schedule, str):
        return RECIPES[config.schedule]
    if config.schedule is not None:
        return config.schedule
    peak = config.lr or 0.0
    ramp = [
        Segment(steps=config.warmup_steps, lr=peak, shape="linear"),
        Segment(steps=config.stable_steps, lr=peak, shape="constant"),
    ]
    if config.decay_steps:  # without a decay, the rate stays at its peak
        last = Segment(steps=config.decay_steps, lr=config.min_lr or 0.0, shape=config.decay)
        ramp.append(last)
    return ramp


def stretches(config: OptimConfig, tokens_per_step: int) -> list[Stretch]:
    """Return the segments of a schedule with their positions.

    Args:
        config: settings of the optimizer.
        tokens_per_step: tokens of a global batch, constant in a run.

    Raises:
        ValueError: a segment would end before the previous segment, or a batch has no tokens.
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
    """Return the learning rate of one update, before the scale of a parameter group.

    Args:
        step: number of updates before this one; the first update is step 0.
        config: settings of the optimizer.
        tokens_per_step: tokens of a global batch. The position in tokens is (step + 1) times this,
            so if a run changes its batch size, only segments in steps keep their positions.

    Returns:
        The rate of the segment in which this step ends; after the last segment, its `lr`.

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
    """Return the number of steps until the rate is constant at the last segment's `lr`."""
    return math.ceil(stretches(config, tokens_per_step)[-1].end / tokens_per_step)


def describe_schedule(config: OptimConfig, tokens_per_step: int) -> str:
    """Return one line that describes each segment: its rates, its shape and its last step.

    Raises:
        ValueError: see `stretches`.
    """
    told = []
    for stretch in stretches(config, tokens_per_step):
        if stretch.end > stretch.start:
            last, segment = math.ceil(stretch.end / tokens_per_step), stretch.segment
            came_from = "" if segment.shape == "constant" else f"{stretch.begin_lr:g} to "
            told.append(f"{came_from}{segment.lr:g} ({segment.shape}) until step {last:,}")
    rest = f"then {stretches(config, tokens_per_step)[-1].segment.lr:g}"
    return "learning rate: " + ", ".join([*told, rest])
