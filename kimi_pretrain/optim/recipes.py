"""Segments of a learning-rate schedule, and the published recipes written in them.

A schedule is a list of segments, one after the other. Each leads from the learning rate that the
one before ended with (0 before the first) to its own `lr`. Lengths are in steps, or in tokens, so
that a recipe means the same at any batch size; `schedule.py` evaluates them.
"""

import math
from typing import Literal, Self

from pydantic import model_validator

from typed_config.section import Section

Shape = Literal["linear", "cosine", "constant"]


class Segment(Section):
    """One stretch of a schedule; exactly one of steps, tokens and until_tokens says how long."""

    lr: float
    """Learning rate that the segment ends with, exactly: the rate of its last step.
    [-; kimi_pretrain/optim/schedule.py]"""
    shape: Shape
    """Of the way there. "linear": a straight line. "cosine": half a cosine wave, flat at both ends.
    "constant": jumps to lr at once and stays.
    [-; kimi_pretrain/optim/schedule.py]"""
    steps: int | None = None
    """Length. 0 is allowed and only sets what the next one begins with.
    [optimizer steps; kimi_pretrain/optim/recipes.py]"""
    tokens: float | None = None
    """Length in tokens of the global batch, a whole number.
    [tokens; kimi_pretrain/optim/recipes.py]"""
    until_tokens: float | None = None
    """End of the segment, counted from the start of training.
    [tokens; kimi_pretrain/optim/recipes.py]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        where = f"segment {self.told()}"
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"{where}: lr must be a number >= 0, got {self.lr}")
        lengths = [self.steps, self.tokens, self.until_tokens]
        given = [length for length in lengths if length is not None]
        if len(given) != 1:
            raise ValueError(f"{where}: give exactly one of steps, tokens and until_tokens")
        if not (math.isfinite(given[0]) and given[0] >= 0 and given[0] == int(given[0])):
            raise ValueError(f"{where}: its length must be a whole number >= 0, got {given[0]}")
        return self

    def told(self) -> str:
        """Return the segment as one writes it: {steps: 500, lr: 0.0002, shape: linear}."""
        lengths = {"steps": self.steps, "tokens": self.tokens, "until_tokens": self.until_tokens}
        parts = {k: v for k, v in lengths.items() if v is not None}
        parts |= {"lr": self.lr, "shape": self.shape}
        return "{" + ", ".join(f"{key}: {value}" for key, value in parts.items()) + "}"

    def end(self, start: int, tokens_per_step: int) -> int:
        """Return where the segment ends, in tokens since the start of training.

        Args:
            start: where it begins, in the same unit.

        Raises:
            ValueError: it ends before it begins.
        """
        if self.steps is not None:
            return start + self.steps * tokens_per_step
        if self.tokens is not None:
            return start + int(self.tokens)
        end = int(self.until_tokens or 0)
        if end < start:
            raise ValueError(
                f"optim.schedule: segment {self.told()} ends at {end:,} tokens, but the segments "
                f"before it take {start:,} (a step is {tokens_per_step:,} tokens)"
            )
        return end


# Kimi K2 (arXiv:2507.20534, section 2.5): 15.5T tokens at 67M a step, the warm-up counted among the
# first 10T; then annealing, 400B tokens at 4k and 60B at 32k context. Not stated: the shape of the
# warm-up and of the annealing (lines here), and whether the rate moves in the 60B (it does here).
_K2 = (
    Segment(steps=500, lr=2e-4, shape="linear"),
    Segment(until_tokens=10e12, lr=2e-4, shape="constant"),
    Segment(until_tokens=15.5e12, lr=2e-5, shape="cosine"),
    Segment(tokens=400e9 + 60e9, lr=7e-6, shape="linear"),
)

# Moonlight (arXiv:2502.16982, section 3.3). The paper's batch grows from 2,048 to 4,096 sequences
# of 8,192 at 200B tokens. A run here has one batch size: the stretches in tokens lie where the
# paper has them, the two in steps (2,000 and 100) last as many steps, whatever a step's size.
_MOONLIGHT = (
    Segment(steps=2000, lr=4.2e-4, shape="linear"),
    Segment(until_tokens=5.2e12, lr=4.2e-5, shape="cosine"),
    Segment(steps=100, lr=1e-4, shape="linear"),
    Segment(until_tokens=5.7e12, lr=0.0, shape="linear"),
)

RECIPES: dict[str, tuple[Segment, ...]] = {"k2": _K2, "moonlight": _MOONLIGHT}
