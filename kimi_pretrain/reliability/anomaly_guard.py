"""Anomaly guard: decides before the update about steps that are not finite or that spike.

    loss, grad_norm  ->  verdict  ->  an update or none  ->  a line in anomalies.jsonl, or the end

A step is "nonfinite" if its loss or gradient norm is not finite, or if the gradient that enters the
optimizer is above LARGEST_NORM: its squares and their sums would overflow in the optimizer's
float32, which never recovers from that. A step is a "spike" if its loss is above
`guard.spike_ratio` times the median of the last `guard.spike_window` losses; until that many losses
exist, no step is a spike. Both numbers are sums over all ranks and equal on each rank, so all ranks
decide alike without communication. The median covers the losses of applied steps: a skipped spike
does not move it, a recorded spike does. Checkpoints store these losses, so a resumed run decides as
an uninterrupted one.

A skipped step changes nothing: neither weights nor momentum nor routing biases, and the schedule
does not advance. Its data is not used again.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from data_pipeline.index.columns import SourceIndex
    from data_pipeline.plan.step_plan import GlobalPlan
    from kimi_pretrain.reliability.config import GuardConfig

# AdamW's second moment overflows from 1.8e19 on and never recovers; Muon squares sums of up to
# 1 / (1 - momentum) gradients. Healthy training stays far below this limit.
LARGEST_NORM = 1e16

Kind = Literal["nonfinite", "spike"]
Action = Literal["update", "record", "skip", "stop"]


class AnomalyError(ValueError):
    """The guard ends the run (`guard` in the config); the message names the step and the remedy."""


@dataclass(frozen=True)
class Verdict:
    """Decision about a step.

    Attributes:
        kind: kind of anomaly, or None.
        action: "update" for a good step; "record" updates as well; "skip" and "stop" do not.
    """

    kind: Kind | None = None
    action: Action = "update"

    @property
    def applies(self) -> bool:
        """True if the step updates the model."""
        return self.action in ("update", "record")


def judge(config: "GuardConfig", losses: Sequence[float], loss: float, norm: float) -> Verdict:
    """Return the verdict on a step with this loss and clipped gradient norm.

    `losses` holds the losses of the last `spike_window` applied steps, oldest first.
    """
    if not (math.isfinite(loss) and norm <= LARGEST_NORM):  # a NaN norm fails the comparison
        return Verdict("nonfinite", config.nonfinite)
    seen = len(losses) >= config.spike_window
    if config.spike_ratio is not None and seen:
        usual = statistics.median(losses[-config.spike_window :])
        if loss > config.spike_ratio * usual:
            return Verdict("spike", config.spike)
    return Verdict()


class Guard:
    """Judges every step; keeps the recent losses and the number of consecutive skipped steps."""

    def __init__(self, config: "GuardConfig"):
        self.config = config
        self.skips_in_row = 0
        self._losses: deque[float] = deque(maxlen=config.spike_window)

    @property
    def losses(self) -> tuple[float, ...]:
        """The last `spike_window` losses of applied steps; empty if the spike check is off."""
        return tuple(self._losses)

    def judge(self, loss: float, norm: float) -> Verdict:
        """Return the verdict on a step, and update the state."""
        verdict = judge(self.config, self.losses, loss, norm)
        if verdict.applies:
            self.skips_in_row = 0
            # A step without trainable tokens has no loss.
            if self.config.spike_ratio is not None and loss > 0:
                self._losses.append(loss)
        else:
            self.skips_in_row += 1
        return verdict

    def resume(self, losses: Sequence[float], skips_in_row: int) -> None:
        """Restore the state from a checkpoint."""
        self._losses = deque(losses, maxlen=self.config.spike_window)
        self.skips_in_row = skips_in_row

    def check(self, step: int, verdict: Verdict, loss: float, norm: float) -> None:
        """Raise if the config ends the run at this step; all ranks raise alike.

        Raises:
            AnomalyError: the action is "stop", or too many consecutive steps were skipped.
        """
        what = f"step {step} is not applied: loss {loss:g}, gradient norm {norm:g} ({verdict.kind})"
        where = "its samples are in anomalies.jsonl; `kimi-pretrain data show --anomaly` shows them"
        if verdict.action == "stop":
            raise AnomalyError(
                f"{what}, guard.{verdict.kind}=stop; {where}; to go past it, resume with "
                f"guard.{verdict.kind}=skip"
            )
        limit = self.config.skips_in_row
        if not verdict.applies and self.skips_in_row >= limit:
            raise AnomalyError(
                f"{what}, and so are {self.skips_in_row} steps in a row "
                f"(guard.skips_in_row={limit}); {where}; resume from an earlier checkpoint, with a "
                "lower learning rate or other data"
            )


def anomaly(
    step: int,
    verdict: Verdict,
    loss: float,
    norm: float,
    plan: "GlobalPlan",
    indices: "Sequence[SourceIndex]",
    state: dict[str, Any],
) -> dict[str, Any]:
    """Return the record for anomalies.jsonl, with null for numbers that are not finite.

    Args:
        step: counted from 1, as in metrics.jsonl.
        indices: indices of the sources, in the data planner's order.
        state: state of the loader before the step. `data show` uses it to open the same rows, even
            if samples were quarantined since.
    """
    return {
        "step": step,
        "kind": verdict.kind,
        "loss": finite(loss),
        "grad_norm": finite(norm),
        "action": verdict.action,
        "samples": sample_names(plan, indices),
        "loader": state,
    }


def sample_names(plan: "GlobalPlan", indices: "Sequence[SourceIndex]") -> list[list[str]]:
    """Return [source, key] of every sample of a step, in row order."""
    samples = plan.samples
    return [
        [indices[source].name, indices[source].key_of(index)]
        for source, index in zip(samples.source.tolist(), samples.index.tolist(), strict=True)
    ]


def finite(value: Any) -> Any:
    """Replace every number that is not finite by None (null), because JSON cannot hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
