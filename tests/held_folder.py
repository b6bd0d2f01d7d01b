"""Run folder whose lock names an active start, without a real process."""

import json
from pathlib import Path


def hold(run_dir: Path, start: str) -> None:
    """Write the id of a start into the folder's lock, as rank 0 of that start does."""
    (run_dir / "lock").write_text(json.dumps({"id": start}) + "\n")
