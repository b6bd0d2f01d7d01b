"""The `guard` section: what happens to steps that would harm the model."""

from typing import Literal

from pydantic import Field

from typed_config.section import Section


class GuardConfig(Section):
    """What happens to steps that would harm the model.

    The samples of every such step are written down.
    """

    nonfinite: Literal["skip", "stop"] = "skip"
    """A step with a loss or gradient that is not finite is skipped (no update), or the run stops.
    [-; kimi_pretrain/reliability/anomaly_guard.py]"""
    spike: Literal["record", "skip", "stop"] = "record"
    """The same for a spike of the loss; record updates all the same.
    [-; kimi_pretrain/reliability/anomaly_guard.py]"""
    spike_ratio: float | None = Field(default=None, gt=1)
    """A spike is a loss above this times the median of the last losses; null looks for none.
    [-; kimi_pretrain/reliability/anomaly_guard.py]"""
    spike_window: int = Field(default=64, gt=0)
    """How many losses that median is of. [steps; kimi_pretrain/reliability/anomaly_guard.py]"""
    skips_in_row: int = Field(default=10, gt=0)
    """After so many skipped steps in a row the run stops.
    [steps; kimi_pretrain/reliability/anomaly_guard.py]"""
    replicas_every: int | None = Field(default=1, gt=0)
    """Steps between comparisons of the ranks' copies of some tensors, in turn; null: at the start
    alone.
    [steps; kimi_pretrain/run.py]"""
