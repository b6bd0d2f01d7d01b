"""Exit reports: one line from each failed rank, shown to the user.

    logs/error_rank_3.txt       the message, then the exit code and the id of the start
    logs/held_rank_3.txt        the id of the start, then the stacks of a process stuck in C code

The supervisor (`launch.local.supervise`, or a batch script) shows the line of the first rank that
failed and exits with its code, because torchrun reports neither. It reads only reports of its own
start. Only the start that holds the run folder writes there; any other start writes into the
private folder of its supervisor (`kimi_pretrain.reliability.start_identity`).

Exit code 2 is a user error, which a retry cannot fix. Code 75 (EX_TEMPFAIL of sysexits.h) means no
progress. Any other code (usually 1) is a fault that is worth a restart.
"""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kimi_pretrain.reliability.run_files import write_whole
from kimi_pretrain.reliability.stack_inspection import ROOMS, where
from kimi_pretrain.reliability.start_identity import LOCK_WAIT_S, REPORTS, report_base, start_id

FAULT = 1
USER_ERROR = 2
NO_PROGRESS = 75
WORDS = "logs/error_rank_*.txt"
HELD = "logs/held_rank_*.txt"
STALLS = "logs/stalled_rank_*.json"


class StepFault(RuntimeError):
    """A bug that surfaced inside a training step; the message names the original error."""


def is_foreign(error: BaseException) -> bool:
    """Return True for a ValueError whose class is defined outside this project."""
    ours = type(error).__module__.partition(".")[0] in ROOMS
    return isinstance(error, ValueError) and not ours


@contextmanager
def step_faults() -> Iterator[None]:
    """Turn a foreign ValueError into a `StepFault`.

    Before the first step, a ValueError is a check that refuses a user's setting. Inside a step it
    is
    a bug in this project or in a library: it keeps its traceback, and a restart may help.
    """
    try:
        yield
    except ValueError as error:
        if not is_foreign(error):
            raise
        raise StepFault(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class ExitReport:
    """The reason a rank ended: a one-line message and the exit code of its process."""

    message: str
    code: int = USER_ERROR


def error_file(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's exit report."""
    return run_dir / "logs" / f"error_rank_{rank}.txt"


def held_file(run_dir: Path, rank: int) -> Path:
    """Return the path to which a C thread writes the stacks of a rank that is stuck in C code."""
    return run_dir / "logs" / f"held_rank_{rank}.txt"


def open_held(base: Path, rank: int) -> int:
    """Open the held file of a rank and write the start id; stacks follow only if the rank hangs."""
    file = held_file(base, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.write(descriptor, f"start {start_id()}\n".encode())
    return descriptor


def _told_of(file: Path, dump: str) -> str:
    """Summarize faulthandler's stack dump of a held process in one line."""
    *_, main = dump.split("(most recent call first):")  # faulthandler prints the main thread last
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', main)
    at = where([(path, int(number), name) for path, number, name in frames])
    rank = file.stem.removeprefix("held_rank_")
    return (
        f"no progress (train.timeout_seconds): rank {rank} is in C code that keeps Python's lock, "
        f"at {at}; all stacks are in {file}"
    )


def write_exit_report(run_dir: Path, rank: int, report: ExitReport) -> None:
    """Write a rank's exit report if its start may write one; otherwise only stderr has it."""
    with suppress(OSError):
        base = report_base(run_dir, LOCK_WAIT_S if rank else 0.0)
        if base is not None:
            file = error_file(base, rank)
            file.parent.mkdir(parents=True, exist_ok=True)
            message = " ".join(report.message.split())
            write_whole(file, f"{message}\nexit code {report.code}, start {start_id()}\n")


def remove_private_report(rank: int) -> None:
    """Remove the report that an earlier attempt of this rank left in its supervisor's folder."""
    if private := os.environ.get(REPORTS):
        error_file(Path(private), rank).unlink(missing_ok=True)


def remove_exit_reports(base: Path) -> None:
    """Remove all ranks' reports of earlier starts or attempts. Call this under the lock."""
    for words in (WORDS, HELD, STALLS):
        for file in base.glob(words):
            file.unlink(missing_ok=True)


def report_files(base: Path) -> dict[Path, tuple[int, int]]:
    """Return the existing report files, each with (inode, mtime) to detect replacement."""
    found = {}
    for words in (WORDS, HELD):
        for file in base.glob(words):
            with suppress(FileNotFoundError):
                status = file.stat()
                found[file] = (status.st_ino, status.st_mtime_ns)
    return found


def first_exit_report(
    *bases: Path, start: str | None = None, known: Collection[tuple[int, int]] = ()
) -> ExitReport | None:
    """Return the report of the rank that failed first; None if there is none.

    Args:
        bases: the run folder, and the private folder of the supervisor.
        start: id of the start whose reports count; None accepts any start.
        known: (inode, mtime) stamps from `report_files` of earlier reports, which are ignored.
    """
    found: list[tuple[int, ExitReport]] = []
    for file, stamp in ((f, s) for base in bases for f, s in report_files(base).items()):
        try:
            text = file.read_text(errors="replace")
        except FileNotFoundError:  # a restarting rank has just removed it
            continue
        report, of = _parse_held(file, text) if file.match(HELD) else _parse(text)
        if report is not None and stamp not in known and start in (None, of):
            found.append((stamp[1], report))
    return min(found, key=lambda one: one[0])[1] if found else None


def _parse(text: str) -> tuple[ExitReport, str | None]:
    """Return a report and the id of its start; the id is None in a report written by hand."""
    message, _, rest = text.partition("\n")
    match = re.fullmatch(r"exit code (\d+)(?:, start (\S+))?\n?", rest)
    if match is None:
        return ExitReport(message), None
    return ExitReport(message, int(match[1])), match[2]


def _parse_held(file: Path, text: str) -> tuple[ExitReport | None, str | None]:
    """Return the report and start id of a held file; the report is None if it has no stacks."""
    start, _, dump = text.partition("\n")
    report = ExitReport(_told_of(file, dump), NO_PROGRESS) if dump else None
    return report, start.removeprefix("start ")
