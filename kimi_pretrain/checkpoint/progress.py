"""What a rank tells the others of the save that is under way."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kimi_pretrain.checkpoint.manifest import Fingerprint


@dataclass(frozen=True)
class Progress:
    """How far one rank's writer is with the save that is under way; small, and picklable.

    Attributes:
        phase: "writing"; "written"; "committed", of rank 0 alone; or "failed".
        bytes_done: written so far.
        files: what was written; told once, and empty in later reports.
        error: why it failed, in one line.
        passing: whether a later run may do better: the place does not answer, or the process was
            killed.
        told: warnings of the writer.
    """

    phase: Literal["writing", "written", "committed", "failed"]
    bytes_done: int = 0
    files: Mapping[str, Fingerprint] = field(default_factory=dict)
    error: str | None = None
    passing: bool = False
    told: tuple[str, ...] = ()
