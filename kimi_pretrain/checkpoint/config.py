"""The `checkpoint` and `resume` sections; docs/RELIABILITY.md explains each key."""

from pydantic import Field

from typed_config.section import Section


class CheckpointConfig(Section):
    """Interval, location and retention of checkpoints."""

    every: int | None = Field(default=None, gt=0)
    """Steps between saves; the last step is also saved. null disables periodic saves.
    [steps; kimi_pretrain/checkpoint/scheduler.py]"""
    place: str | None = None
    """A folder that all ranks see, or an s3:// URI; null is `checkpoints` in the run folder.
    [-; kimi_pretrain/checkpoint/scheduler.py]"""
    asynchronous: bool = True
    """Write during training, from a copy in host memory.
    [-; kimi_pretrain/checkpoint/scheduler.py]"""
    keep_last: int | None = Field(default=None, gt=0)
    """Number of newest complete checkpoints to keep; null keeps all.
    [checkpoints; kimi_pretrain/checkpoint/saver.py]"""
    keep_every: int | None = Field(default=None, gt=0)
    """Also keep checkpoints whose step is a multiple of this; null keeps no others.
    [steps; kimi_pretrain/checkpoint/saver.py]"""
    failures: int = Field(default=3, gt=0)
    """Number of failed saves in a row that stops the run. Fewer failures only log a warning, and
    the next save is made when it is due.
    [saves; kimi_pretrain/checkpoint/saver.py]"""
    file_mib: int = Field(default=4096, gt=0)
    """Approximate size of the files into which a rank divides its tensors.
    [MiB; kimi_pretrain/checkpoint/saver.py]"""


class ResumeConfig(Section):
    """Settings of a resume."""

    fallback: bool = False
    """Allow a resume from an older checkpoint if the newest is damaged.
    [-; kimi_pretrain/checkpoint/find.py]"""
