"""Reads and writes `status.json` in the run folder: the state of a run, for people and scripts.

    {"state": "stopped", "step": 120, "steps": 500, "reason": "signal SIGUSR1", "checkpoint": ...}

The state is "running", "stopped" (saved, more steps to do), "finished" (all steps done), or
"failed". A run that was asked to stop and could not save is also "failed". A killed rank writes
nothing, so the file still says "running" and the run can be resumed.
"""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kimi_pretrain.reliability.run_files import read_patiently, write_whole

log = logging.getLogger("kimi_pretrain.reliability.status")


@dataclass(frozen=True)
class Status:
    """State of a run; see the module docstring.

    Attributes:
        step: number of completed steps.
        steps: total number of steps: `train.steps`, or fewer if a token budget is known to end the
            run earlier; None while unknown.
        checkpoint: path or URI of the newest complete checkpoint.
    """

    state: Literal["running", "stopped", "finished", "failed"]
    step: int = 0
    steps: int | None = None
    reason: str | None = None
    checkpoint: str | None = None


def write_status(run_dir: Path, status: Status) -> None:
    """Write status.json atomically, even on a full disk.

    Raises:
        OSError: the file cannot be written; names the file.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / "status.json", json.dumps(asdict(status)) + "\n", in_place=True)


def read_status(run_dir: Path) -> Status | None:
    """Return the status of a run folder, or None if it has no status.json.

    Raises:
        ValueError: status.json is invalid or truncated; names the file.
        OSError: the file cannot be read; names the file.
    """
    file = run_dir / "status.json"
    known, data = Status.__dataclass_fields__, read_patiently(file)
    if data is None:
        return None
    try:
        values = json.loads(data)
        return Status(**{name: value for name, value in values.items() if name in known})
    except (ValueError, AttributeError, TypeError):
        raise ValueError(
            f"{file} is {data[:100]!r}, expected how a run stands; remove it, the next start "
            "writes it anew"
        ) from None


def mark_failed(run_dir: Path, reason: str) -> None:
    """Mark a run as failed; keep its recorded progress.

    A write error is only logged, so that it does not hide the error that ended the run.
    """
    try:
        last = read_status(run_dir) or Status("failed")
    except ValueError:
        last = Status("failed")
    except OSError as error:  # a write would fail, too
        log.warning("%s: %s", error.filename, error.strerror)
        return
    try:
        write_status(run_dir, Status("failed", last.step, last.steps, reason, last.checkpoint))
    except OSError as error:
        log.warning("%s: %s", error.filename, error.strerror)
