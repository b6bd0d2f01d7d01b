"""The `guard` section: handling of steps that would harm the model."""

from typing import Literal

from pydantic import Field

from typed_config.section import Section


class GuardConfig(Section):
    """Handling of steps that would harm the model.

    The samples of every such step are recorded in anomalies.jsonl.
    """

    nonfinite: Literal["skip", "stop"] = "skip"
    """Action on a step whose loss or gradient is not finite: skip its update, or stop the run.
    [-; kimi_pretrain/reliability/anomaly_guard.py]"""
    spike: Literal["record", "skip", "stop"] = "record"
    """Action on a loss spike: record it and update anyway, skip the update, or stop the run.
    [-; kimi_pretrain/reliability/anomaly_guard.py]"""
    spike_ratio: float | None = Field(default=None, gt=1)
    """A loss above this multiple of the median of recent losses is a spike; null: no check.
    [-; kimi_pretrain/reliability/anomaly_guard.py]"""
    spike_window: int = Field(default=64, gt=0)
    """Recent losses in that median. [steps; kimi_pretrain/reliability/anomaly_guard.py]"""
    skips_in_row: int = Field(default=10, gt=0)
    """Number of consecutive skipped steps that stops the run.
    [steps; kimi_pretrain/reliability/anomaly_guard.py]"""
    replicas_every: int | None = Field(default=1, gt=0)
    """Steps between replica checks; each compares a few tensors across ranks, in rotation; null:
    only at the start.
    [steps; kimi_pretrain/run.py]"""
