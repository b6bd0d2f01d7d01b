"""Identity of a start: which processes were started together, and whether they hold a run folder.

A start is one launch of a training: a supervisor with its torchrun and ranks, one SLURM step, or a
process alone. Its launcher names it in the environment (`START`). The lock of a run folder carries
the name of the start that holds it (`kimi_pretrain.reliability.run_lock`), and only processes of
that start write there: what a refused or half-started one writes, the supervisor of a healthy run
would take for its own. What they have to say before the lock is theirs goes to the private folder
of their supervisor (`REPORTS`), and to stderr.
"""

import json
import os
import secrets
import time
from pathlib import Path

START = "KIMI_PRETRAIN_START"
# Private to one supervisor; it has the shape of a run folder.
REPORTS = "KIMI_PRETRAIN_REPORTS"
LOCK = "lock"
_JOINED = "joined_start"
# How long a rank that fails early, and has no supervisor beside it, waits for rank 0's lock.
LOCK_WAIT_S = 10.0

_own: dict[int, str] = {}  # by process: forks are starts of their own
_joined: dict[int, str] = {}


def start_id() -> str:
    """Return the name of this process's start: rank 0's once joined, the launcher's, or its own."""
    pid = os.getpid()
    return _joined.get(pid) or os.environ.get(START) or _own.setdefault(pid, secrets.token_hex(8))


def join_start(name: str) -> None:
    """Take on the start of rank 0, with which this process shares a job now; tell the supervisor.

    It is another one where a rank was started by hand, or machines name their rendezvous in
    different ways.
    """
    if name == start_id():
        return
    _joined[os.getpid()] = name
    if private := os.environ.get(REPORTS):
        file = Path(private) / f"{_JOINED}.{os.getpid()}"
        file.write_text(name)
        file.replace(Path(private) / _JOINED)


def joined_start(private: Path) -> str | None:
    """Return the start that a supervisor's ranks have joined, if not the one that it named."""
    try:
        return (private / _JOINED).read_text()
    except FileNotFoundError:
        return None


def holder(run_dir: Path) -> dict[str, object]:
    """Return what the lock of a run folder says of its holder, alive or not; empty if nothing."""
    try:
        values = json.loads((run_dir / LOCK).read_text())
    except (OSError, ValueError):  # none, or the holder has not written it yet
        return {}
    return values if isinstance(values, dict) else {}


def holds(run_dir: Path, name: str | None = None) -> bool:
    """Return whether a start, by default this one, was the last to lock a run folder."""
    return holder(run_dir).get("id") == (name or start_id())


def report_base(run_dir: Path, wait: float = 0.0) -> Path | None:
    """Return where this process may write its reports: the run folder, its supervisor's, or None.

    Args:
        wait: seconds in which rank 0 may still get the lock, where there is no supervisor and the
            launcher has named the start.
    """
    private, end = os.environ.get(REPORTS), time.monotonic() + wait
    while not holds(run_dir):
        if private is not None:
            return Path(private)
        if START not in os.environ or time.monotonic() >= end:
            return None
        time.sleep(0.2)
    return run_dir
