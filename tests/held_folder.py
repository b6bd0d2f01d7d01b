"""A run folder that a start holds, without a process of it: its lock says so."""

import json
from pathlib import Path


def hold(run_dir: Path, start: str) -> None:
    """Have a folder's lock name a start, as that of its rank 0 does."""
    (run_dir / "lock").write_text(json.dumps({"id": start}) + "\n")
