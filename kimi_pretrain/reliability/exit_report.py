"""Exit reports: the one line that a failed rank writes, and that the user is shown.

    logs/error_rank_3.txt       the line, then the exit code that goes with it and the start
    logs/held_rank_3.txt        the start, then stacks of a process that could run no more Python

The supervisor (`launch.local.supervise`, or a batch script) shows the line of the first rank that
failed and ends with its code, because torchrun reports neither. It reads reports of its own start
alone, and only the start that holds the run folder writes there; any other writes into the private
folder of its supervisor (`kimi_pretrain.reliability.start_identity`).

Exit codes: 2: user error; a retry fails again. 75 (EX_TEMPFAIL of sysexits.h): no progress. Any
other (1): a fault, worth a restart.
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
    """A bug that a step ran into; the message names the error."""


def is_foreign(error: BaseException) -> bool:
    """Whether an error is a plain ValueError: of a class that is not this project's."""
    ours = type(error).__module__.partition(".")[0] in ROOMS
    return isinstance(error, ValueError) and not ours


@contextmanager
def step_faults() -> Iterator[None]:
    """Turn a plain ValueError into a `StepFault`.

    Before the first step such an error is a check that refuses a value of the user's. In a step it
    is a bug, ours or a library's: it keeps its traceback, and a restart may help.
    """
    try:
        yield
    except ValueError as error:
        if not is_foreign(error):
            raise
        raise StepFault(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class ExitReport:
    """Why a rank ended: one line, and the exit code of its process."""

    message: str
    code: int = USER_ERROR


def error_file(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's exit report."""
    return run_dir / "logs" / f"error_rank_{rank}.txt"


def held_file(run_dir: Path, rank: int) -> Path:
    """Return the file into which a C thread writes the stacks of a rank that runs no Python."""
    return run_dir / "logs" / f"held_rank_{rank}.txt"


def open_held(base: Path, rank: int) -> int:
    """Open that file below a run folder, or a private one; it holds no stacks unless held."""
    file = held_file(base, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.write(descriptor, f"start {start_id()}\n".encode())
    return descriptor


def _told_of(file: Path, dump: str) -> str:
    """Return one line from what faulthandler wrote about a held process."""
    *_, main = dump.split("(most recent call first):")  # the main thread comes last
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', main)
    at = where([(path, int(number), name) for path, number, name in frames])
    rank = file.stem.removeprefix("held_rank_")
    return (
        f"no progress (train.timeout_seconds): rank {rank} is in C code that keeps Python's lock, "
        f"at {at}; all stacks are in {file}"
    )


def write_exit_report(run_dir: Path, rank: int, report: ExitReport) -> None:
    """Write a rank's exit report where its start may write; else stderr alone has the message."""
    with suppress(OSError):
        base = report_base(run_dir, LOCK_WAIT_S if rank else 0.0)
        if base is not None:
            file = error_file(base, rank)
            file.parent.mkdir(parents=True, exist_ok=True)
            message = " ".join(report.message.split())
            write_whole(file, f"{message}\nexit code {report.code}, start {start_id()}\n")


def remove_private_report(rank: int) -> None:
    """Remove this rank's report to its supervisor of an earlier attempt."""
    if private := os.environ.get(REPORTS):
        error_file(Path(private), rank).unlink(missing_ok=True)


def remove_exit_reports(base: Path) -> None:
    """Remove what all ranks left of an earlier start or attempt. Call it under the lock."""
    for words in (WORDS, HELD, STALLS):
        for file in base.glob(words):
            file.unlink(missing_ok=True)


def report_files(base: Path) -> dict[Path, tuple[int, int]]:
    """Return the reports that are there, each with what tells one from a later one."""
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
        bases: run folder, and the private one of the supervisor.
        start: only reports of this start; None: of any.
        known: reports of `report_files` that were there before, and do not count.
    """
    found: list[tuple[int, ExitReport]] = []
    for file, stamp in ((f, s) for base in bases for f, s in report_files(base).items()):
        try:
            text = file.read_text(errors="replace")
        except FileNotFoundError:  # a rank that starts again has just removed it
            continue
        report, of = _parse_held(file, text) if file.match(HELD) else _parse(text)
        if report is not None and stamp not in known and start in (None, of):
            found.append((stamp[1], report))
    return min(found, key=lambda one: one[0])[1] if found else None


def _parse(text: str) -> tuple[ExitReport, str | None]:
    """Return a report and the start that wrote it, None in one written by hand."""
    message, _, rest = text.partition("\n")
    match = re.fullmatch(r"exit code (\d+)(?:, start (\S+))?\n?", rest)
    if match is None:
        return ExitReport(message), None
    return ExitReport(message, int(match[1])), match[2]


def _parse_held(file: Path, text: str) -> tuple[ExitReport | None, str | None]:
    """Return the same of stacks; no report where there are none."""
    start, _, dump = text.partition("\n")
    report = ExitReport(_told_of(file, dump), NO_PROGRESS) if dump else None
    return report, start.removeprefix("start ")
