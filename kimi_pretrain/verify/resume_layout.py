"""Did a run that went on in another layout read the same, and lose the same? Pure."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from kimi_pretrain.verify.compare import relative_error
from kimi_pretrain.verify.resume import READ, Difference, Trace, line_differences


@dataclass(frozen=True)
class OtherLayout:
    """A run that went on in another layout.

    Attributes:
        stop: step after which it changed.
        steps: compared after it.
        after: what each step read and should not have: counts, and the hash of its plan.
        loss_errors: relative, step by step.
        norm_errors: likewise, of the gradient's norm.
        allowed: for the first step, whose weights are the same; and for the others, which carry
            the rounding of the updates before them.
    """

    stop: int
    steps: int
    after: tuple[Difference, ...]
    loss_errors: tuple[float, ...]
    norm_errors: tuple[float, ...]
    allowed: tuple[float, float]

    @property
    def passed(self) -> bool:
        """Whether it read the same, and losses and norms are the same but for rounding."""
        errors = zip(self.loss_errors, self.norm_errors, strict=True)
        within = [max(pair) <= self.allowed[at > 0] for at, pair in enumerate(errors)]
        return self.steps > 0 and not self.after and all(within)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; errors that are not finite become null."""
        finite = {
            name: [error if math.isfinite(error) else None for error in getattr(self, name)]
            for name in ("loss_errors", "norm_errors")
        }
        return {"passed": self.passed, **asdict(self), **finite}


# By train.dtype: of the first step after the stop, and of those after it. A token that rounding
# sends to another expert moves the loss of a small batch by 2e-5 in float32.
ROUNDING = {
    "float64": (1e-10, 1e-8),
    "float32": (1e-5, 1e-3),
    "bfloat16": (2e-2, 5e-2),
}


def compare_layouts(found: Trace, wanted: Trace, stop: int, dtype: str) -> OtherLayout:
    """Compare a run that went on in another layout with one that was never stopped.

    Args:
        found, wanted, stop: as in `compare`.
        dtype: `train.dtype`.
    """
    steps = sorted(step for step in {*found.lines, *wanted.lines} if step > stop)
    both = [step for step in steps if step in found.lines and step in wanted.lines]
    differing = (line_differences(step, found, wanted) for step in steps)
    read = [one for step in differing for one in step if one.name in (*READ, "line")]

    def errors(name: str) -> tuple[float, ...]:
        return tuple(_error(found.lines[s][name], wanted.lines[s][name]) for s in both)

    return OtherLayout(
        stop=stop,
        steps=len(both),
        after=tuple(read),
        loss_errors=errors("loss"),
        norm_errors=errors("grad_norm"),
        allowed=ROUNDING[dtype],
    )


def _error(found: float | None, wanted: float | None) -> float:
    """Return the relative error; infinite where only one is a number."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else math.inf
    return relative_error(found, wanted)
