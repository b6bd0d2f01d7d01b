"""Identity of a start: the processes launched together, and whether they hold a run folder.

A start is one launch of a training: a supervisor with its torchrun and ranks, one SLURM step, or a
single process. Its launcher names it in the environment (`START`). The lock of a run folder carries
the name of the start that holds it (`kimi_pretrain.reliability.run_lock`), and only processes of
that start write into the folder. Otherwise the supervisor of a healthy run would read the reports
of a refused or incomplete start as its own. Until a start holds the lock, its processes write
reports to the private folder of their supervisor (`REPORTS`) and to stderr.
"""

import json
import os
import secrets
import time
from pathlib import Path

START = "KIMI_PRETRAIN_START"
# Private folder of one supervisor, with the layout of a run folder.
REPORTS = "KIMI_PRETRAIN_REPORTS"
LOCK = "lock"
_JOINED = "joined_start"
# Time that a rank which fails early and has no supervisor waits for rank 0 to get the lock.
LOCK_WAIT_S = 10.0

_own: dict[int, str] = {}  # keyed by process: a fork is a separate start
_joined: dict[int, str] = {}


def start_id() -> str:
    """Return the name of the start: rank 0's if joined, else the launcher's, else a random id."""
    pid = os.getpid()
    return _joined.get(pid) or os.environ.get(START) or _own.setdefault(pid, secrets.token_hex(8))


def join_start(name: str) -> None:
    """Adopt the start of rank 0, which shares a job with this process; inform the supervisor.

    The names differ if a rank was started by hand, or if machines name their rendezvous
    differently.
    """
    if name == start_id():
        return
    _joined[os.getpid()] = name
    if private := os.environ.get(REPORTS):
        file = Path(private) / f"{_JOINED}.{os.getpid()}"
        file.write_text(name)
        file.replace(Path(private) / _JOINED)


def joined_start(private: Path) -> str | None:
    """Return the start that a supervisor's ranks joined, or None if they kept its own start."""
    try:
        return (private / _JOINED).read_text()
    except FileNotFoundError:
        return None


def holder(run_dir: Path) -> dict[str, object]:
    """Return the holder entry of a run folder's lock, alive or not; empty if there is none."""
    try:
        values = json.loads((run_dir / LOCK).read_text())
    except (OSError, ValueError):  # no lock file, or the holder has not written it yet
        return {}
    return values if isinstance(values, dict) else {}


def holds(run_dir: Path, name: str | None = None) -> bool:
    """Return True if a start (default: this start) was the last to lock a run folder."""
    return holder(run_dir).get("id") == (name or start_id())


def report_base(run_dir: Path, wait: float = 0.0) -> Path | None:
    """Return the folder for this process's reports: the run folder, its supervisor's, or None.

    Args:
        wait: seconds to wait for rank 0 to get the lock, if there is no supervisor and the launcher
            has named the start.
    """
    private, end = os.environ.get(REPORTS), time.monotonic() + wait
    while not holds(run_dir):
        if private is not None:
            return Path(private)
        if START not in os.environ or time.monotonic() >= end:
            return None
        time.sleep(0.2)
    return run_dir
