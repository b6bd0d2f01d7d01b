"""`status.json` in the run folder: how a run stands, for people and for batch scripts.

    {"state": "stopped", "step": 120, "steps": 500, "reason": "signal SIGUSR1", "checkpoint": ...}

"running", "stopped" (in order: it saved, and there is more to do), "finished" (all steps are done),
or "failed", as a run also is that was stopped and could not save. A rank that is killed writes
nothing: then it says "running", and there is more to do.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

STATES = ("running", "stopped", "finished", "failed")


@dataclass(frozen=True)
class Status:
    """How a run stands.

    Attributes:
        state: see the module.
        step: steps done.
        steps: that the run is to do; None as long as nobody knows.
        reason: why it stopped or failed.
        checkpoint: the last one that is complete, as a path or URI.
    """

    state: Literal["running", "stopped", "finished", "failed"]
    step: int = 0
    steps: int | None = None
    reason: str | None = None
    checkpoint: str | None = None


def write_status(run_dir: Path, status: Status) -> None:
    """Write it so that a reader sees the old one or the new one, never a part."""
    partial = run_dir / "status.json.partial"
    run_dir.mkdir(parents=True, exist_ok=True)
    with partial.open("w") as file:
        json.dump(asdict(status), file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(run_dir / "status.json")


def read_status(run_dir: Path) -> Status | None:
    """Return what a run folder says; None where no run has said anything."""
    file = run_dir / "status.json"
    if not file.is_file():
        return None
    known = Status.__dataclass_fields__
    values = json.loads(file.read_text())
    return Status(**{name: value for name, value in values.items() if name in known})


def mark_failed(run_dir: Path, reason: str) -> None:
    """Note that a run ended by an error, keeping how far it had come."""
    last = read_status(run_dir) or Status("failed")
    write_status(run_dir, Status("failed", last.step, last.steps, reason, last.checkpoint))
