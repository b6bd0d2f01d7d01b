"""Reads what a run left behind for `kimi_pretrain.verify.resume` to compare.

metrics.jsonl          a line a step
state_hashes.json      SHA-256 of every tensor at the end
watched.jsonl          a line a step with the hash of its plan      } only where
resumed.json           all it remembered when it went on            } somebody watched
the last checkpoint    the rest of the state at the end, and the tensors themselves
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from kimi_pretrain.checkpoint.storage_read import Checkpoint
from kimi_pretrain.verify.resume import Moment, ReadBoth, Trace

WATCHED = "watched.jsonl"
RESUMED = "resumed.json"


def read_trace(run_dir: Path, last: Checkpoint | None = None) -> Trace:
    """Return the trace of a finished run.

    Args:
        run_dir: of the run.
        last: its checkpoint of the last step; without it only a hash tells what the run remembered
            at the end besides tensors.

    Raises:
        FileNotFoundError: the run did not come to its end.
    """
    hashes = _read(run_dir / "state_hashes.json")
    resumed, watched = run_dir / RESUMED, _lines(run_dir / WATCHED)
    return Trace(
        lines={line["step"]: line for line in _lines(run_dir / "metrics.jsonl")},
        samples={line["step"]: line["samples"] for line in watched},
        began=watched[-1]["began"] if watched else None,
        resumed=Moment(**_read(resumed)) if resumed.is_file() else None,
        end=Moment(hashes["per_tensor"], _end_state(hashes, last)),
    )


def reader(found: Checkpoint, wanted: Checkpoint) -> ReadBoth:
    """Return what reads a tensor from both runs' checkpoints of the last step."""

    def read(name: str) -> tuple[Tensor, Tensor]:
        return found.tensor(name), wanted.tensor(name)

    return read


def _end_state(hashes: dict[str, Any], last: Checkpoint | None) -> dict[str, Any]:
    if last is None:
        return {"step": hashes["step"], "loader": hashes["loader"]}
    return vars(last.manifest().state)


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none where it does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())
