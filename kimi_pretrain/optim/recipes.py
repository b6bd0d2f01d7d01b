"""Segments of a learning-rate schedule, and the published recipes as lists of segments.

A schedule is a list of consecutive segments. Each changes the learning rate from the end value of
the previous segment (0 before the first) to its own `lr`. Lengths are in steps or in tokens; with
tokens, a recipe has the same meaning at any batch size. `schedule.py` evaluates the segments.
"""

import math
from typing import Literal, Self

from pydantic import model_validator

from typed_config.section import Section

Shape = Literal["linear", "cosine", "constant"]


class Segment(Section):
    """One segment of a schedule; exactly one of steps, tokens and until_tokens sets its length."""

    lr: float
    """Learning rate of the segment's last step, exactly.
    [-; kimi_pretrain/optim/schedule.py]"""
    shape: Shape
    """Shape of the segment. "linear": a straight line. "cosine": half a cosine wave, flat at both
    ends. "constant": lr in all of the segment.
    [-; kimi_pretrain/optim/schedule.py]"""
    steps: int | None = None
    """Length in steps. 0 is allowed and only sets the start value of the next segment.
    [optimizer steps; kimi_pretrain/optim/recipes.py]"""
    tokens: float | None = None
    """Length in tokens of the global batch, a whole number.
    [tokens; kimi_pretrain/optim/recipes.py]"""
    until_tokens: float | None = None
    """End of the segment, in tokens since the start of training.
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
        """Return the segment as written in YAML: {steps: 500, lr: 0.0002, shape: linear}."""
        lengths = {"steps": self.steps, "tokens": self.tokens, "until_tokens": self.until_tokens}
        parts = {k: v for k, v in lengths.items() if v is not None}
        parts |= {"lr": self.lr, "shape": self.shape}
        return "{" + ", ".join(f"{key}: {value}" for key, value in parts.items()) + "}"

    def end(self, start: int, tokens_per_step: int) -> int:
        """Return the end of the segment, in tokens since the start of training.

        Args:
            start: start of the segment, in the same unit.
            tokens_per_step: tokens of a global batch.

        Raises:
            ValueError: the segment ends before it begins.
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


# Kimi K2 (arXiv:2507.20534, section 2.5): 15.5T tokens at 67M per step, with the warm-up in the
# first 10T; then annealing, 400B tokens at 4k and 60B at 32k context. The report does not state the
# shapes of the warm-up and the annealing (linear here), or whether the rate changes during the 60B
# (it does here).
_K2 = (
    Segment(steps=500, lr=2e-4, shape="linear"),
    Segment(until_tokens=10e12, lr=2e-4, shape="constant"),
    Segment(until_tokens=15.5e12, lr=2e-5, shape="cosine"),
    Segment(tokens=400e9 + 60e9, lr=7e-6, shape="linear"),
)

# Moonlight (arXiv:2502.16982, section 3.3). The paper's batch grows from 2,048 to 4,096 sequences
# of 8,192 at 200B tokens. A run here has one batch size: segments in tokens are at the positions of
# the paper, and the two in steps (2,000 and 100) have that many steps at any batch size.
_MOONLIGHT = (
    Segment(steps=2000, lr=4.2e-4, shape="linear"),
    Segment(until_tokens=5.2e12, lr=4.2e-5, shape="cosine"),
    Segment(steps=100, lr=1e-4, shape="linear"),
    Segment(until_tokens=5.7e12, lr=0.0, shape="linear"),
)

RECIPES: dict[str, tuple[Segment, ...]] = {"k2": _K2, "moonlight": _MOONLIGHT}
