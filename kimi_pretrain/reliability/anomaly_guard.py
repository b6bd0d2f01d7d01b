"""The anomaly guard: what to do with a step that is not finite or a spike, before its update.

    loss, grad_norm  ->  verdict  ->  an update or none  ->  a line in anomalies.jsonl, or the end

A step is "nonfinite" when its loss or its gradient's norm is not a finite number, or when the
gradient, as it goes into the optimizer, is above LARGEST_NORM: squares and sums of it would not be
finite in the optimizer's float32, which never recovers from that. It is a "spike"
when its loss is above `guard.spike_ratio` times the median of the last `guard.spike_window` losses;
before that many losses have been seen nothing is a spike. Both numbers are sums over all ranks,
equal on each, so all ranks decide alike without communication. The losses are those of applied
steps: a spike that was skipped does not move the median, one that was only recorded does. They are
saved in checkpoints, and a resumed run decides as an uninterrupted one.

A skipped step changes nothing: neither weights nor momentum nor routing biases, and the schedule
stays where it is. Its data is not trained on again.
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

# AdamW's average of squares overflows from 1.8e19 on and then stands still for good; Muon squares
# sums of up to 1 / (1 - momentum) gradients. Nothing that trains comes near.
LARGEST_NORM = 1e16

Kind = Literal["nonfinite", "spike"]
Action = Literal["update", "record", "skip", "stop"]


class AnomalyError(ValueError):
    """The guard ends the run (`guard` in the configuration); says at which step and what to do."""


@dataclass(frozen=True)
class Verdict:
    """What is to be done with a step.

    Attributes:
        kind: what is wrong with it; None if nothing is.
        action: "update" a good step; "record" updates as well; "skip" and "stop" do not.
    """

    kind: Kind | None = None
    action: Action = "update"

    @property
    def applies(self) -> bool:
        """Whether the step updates the model."""
        return self.action in ("update", "record")


def judge(config: "GuardConfig", losses: Sequence[float], loss: float, norm: float) -> Verdict:
    """Return what is to be done with a step of this loss and clipped gradient norm.

    `losses` are those of the last `spike_window` applied steps before it, oldest first.
    """
    if not (math.isfinite(loss) and norm <= LARGEST_NORM):  # nor is it where the norm is no number
        return Verdict("nonfinite", config.nonfinite)
    seen = len(losses) >= config.spike_window
    if config.spike_ratio is not None and seen:
        usual = statistics.median(losses[-config.spike_window :])
        if loss > config.spike_ratio * usual:
            return Verdict("spike", config.spike)
    return Verdict()


class Guard:
    """Judges every step; keeps the losses and the number of steps skipped in a row."""

    def __init__(self, config: "GuardConfig"):
        self.config = config
        self.skips_in_row = 0
        self._losses: deque[float] = deque(maxlen=config.spike_window)

    @property
    def losses(self) -> tuple[float, ...]:
        """The last `spike_window` losses of applied steps; none where no spikes are looked for."""
        return tuple(self._losses)

    def judge(self, loss: float, norm: float) -> Verdict:
        """Return the verdict on a step, and update the state."""
        verdict = judge(self.config, self.losses, loss, norm)
        if verdict.applies:
            self.skips_in_row = 0
            # A step without any token to learn has no loss.
            if self.config.spike_ratio is not None and loss > 0:
                self._losses.append(loss)
        else:
            self.skips_in_row += 1
        return verdict

    def resume(self, losses: Sequence[float], skips_in_row: int) -> None:
        """Restore the state of a checkpoint."""
        self._losses = deque(losses, maxlen=self.config.spike_window)
        self.skips_in_row = skips_in_row

    def check(self, step: int, verdict: Verdict, loss: float, norm: float) -> None:
        """Raise if the configuration ends the run here; on all ranks alike.

        Raises:
            AnomalyError: the step asks for it, or too many were skipped in a row.
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
    """Return the line of anomalies.jsonl; numbers that are not finite are null there.

    Args:
        step: counted from 1, as in metrics.jsonl.
        indices: of the sources, in the planner's order.
        state: of the loader before the step: `data show` opens the same rows by it, whatever was
            put into quarantine since.
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
    """Return [source, key] of every sample of a step, in the order of its rows."""
    samples = plan.samples
    return [
        [indices[source].name, indices[source].key_of(index)]
        for source, index in zip(samples.source.tolist(), samples.index.tolist(), strict=True)
    ]


def finite(value: Any) -> Any:
    """Return a value of JSON with null for every number that is not finite, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
