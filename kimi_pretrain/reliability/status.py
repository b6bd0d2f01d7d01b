"""`status.json` in the run folder: the state of a run, for people and for batch scripts.

    {"state": "stopped", "step": 120, "steps": 500, "reason": "signal SIGUSR1", "checkpoint": ...}

"running", "stopped" (saved, more steps to do), "finished" (all steps done), or "failed", also for a
run that was stopped and could not save. A killed rank writes nothing: the file then still says
"running", and there is more to do.
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
    """State of a run; see the module.

    Attributes:
        step: steps done.
        steps: that the run is to do, or most of them: `train.steps`, or fewer where it is known
            exactly that a budget of tokens ends it; None as long as nobody knows.
        checkpoint: the last one that is complete, as a path or URI.
    """

    state: Literal["running", "stopped", "finished", "failed"]
    step: int = 0
    steps: int | None = None
    reason: str | None = None
    checkpoint: str | None = None


def write_status(run_dir: Path, status: Status) -> None:
    """Write it so that a reader sees the old one or the new one, also where the disk is full.

    Raises:
        OSError: it cannot be written; names the file.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / "status.json", json.dumps(asdict(status)) + "\n", in_place=True)


def read_status(run_dir: Path) -> Status | None:
    """Return what a run folder says; None where no run has said anything.

    Raises:
        ValueError: status.json is none, or torn; names it.
        OSError: it cannot be read; names it.
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
    """Note that a run ended by an error, keeping how far it had come.

    Where that cannot be written it is logged: the error itself is worth more.
    """
    try:
        last = read_status(run_dir) or Status("failed")
    except ValueError:
        last = Status("failed")
    except OSError as error:  # nor could it be written
        log.warning("%s: %s", error.filename, error.strerror)
        return
    try:
        write_status(run_dir, Status("failed", last.step, last.steps, reason, last.checkpoint))
    except OSError as error:
        log.warning("%s: %s", error.filename, error.strerror)
