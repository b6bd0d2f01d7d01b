"""The `checkpoint` and `resume` sections; docs/RELIABILITY.md explains each key."""

from pydantic import Field

from typed_config.section import Section


class CheckpointConfig(Section):
    """What is saved, when and where."""

    every: int | None = Field(default=None, gt=0)
    """Steps between saves; the last step is saved too. null saves nothing on its own.
    [steps; kimi_pretrain/checkpoint/scheduler.py]"""
    place: str | None = None
    """A folder that all ranks see, or an s3:// URI; null is `checkpoints` in the run folder.
    [-; kimi_pretrain/checkpoint/scheduler.py]"""
    asynchronous: bool = True
    """Write beside the training, from a copy in the host's memory.
    [-; kimi_pretrain/checkpoint/scheduler.py]"""
    keep_last: int | None = Field(default=None, gt=0)
    """Of complete checkpoints the newest so many stay; null keeps all.
    [checkpoints; kimi_pretrain/checkpoint/saver.py]"""
    keep_every: int | None = Field(default=None, gt=0)
    """Checkpoints whose step this divides stay besides; null: none.
    [steps; kimi_pretrain/checkpoint/saver.py]"""
    failures: int = Field(default=3, gt=0)
    """A save that fails is told and tried again when the next is due; after so many in a row the
    run stops.
    [saves; kimi_pretrain/checkpoint/saver.py]"""
    file_mib: int = Field(default=4096, gt=0)
    """A rank's tensors are cut into files of about this size.
    [MiB; kimi_pretrain/checkpoint/saver.py]"""


class ResumeConfig(Section):
    """How a run goes on."""

    fallback: bool = False
    """Allow an older checkpoint where the newest is damaged.
    [-; kimi_pretrain/checkpoint/find.py]"""
