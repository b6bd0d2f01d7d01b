"""Exit reports: the one line that a failed rank writes, and that the user is shown.

    logs/error_rank_3.txt       the line, and below it the exit code that goes with it
    logs/held_rank_3.txt        stacks of a process in which no Python could run any more

The supervisor (`launch.local.supervise`, or a batch script) shows the line of the first rank that
failed and ends with its code, because torchrun reports neither. Exit codes: 2: user error; a retry
fails again. 75 (EX_TEMPFAIL of sysexits.h): no progress. Any other (1): a fault, worth a restart.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kimi_pretrain.reliability.run_files import write_whole
from kimi_pretrain.reliability.stack_inspection import ROOMS, where

FAULT = 1
USER_ERROR = 2
NO_PROGRESS = 75
WORDS = "logs/error_rank_*.txt"
HELD = "logs/held_rank_*.txt"


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


def open_held(run_dir: Path, rank: int) -> int:
    """Open that file, empty; it stays empty unless the rank is held."""
    file = held_file(run_dir, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)


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
    """Write a rank's exit report; if it cannot be written, stderr alone has the message."""
    file = error_file(run_dir, rank)
    message = " ".join(report.message.split())
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, f"{message}\nexit code {report.code}\n")


def remove_exit_report(run_dir: Path, rank: int) -> None:
    """Remove this rank's report of an earlier attempt."""
    error_file(run_dir, rank).unlink(missing_ok=True)


def remove_exit_reports(run_dir: Path) -> None:
    """Remove all ranks' reports of an earlier run; several machines may do so at once."""
    for words in (WORDS, HELD):
        for file in run_dir.glob(words):
            file.unlink(missing_ok=True)


def first_exit_report(run_dir: Path) -> ExitReport | None:
    """Return the report of the rank that failed first; None if there is none."""
    found: list[tuple[int, str]] = []
    for file in run_dir.glob(WORDS):
        try:
            found.append((file.stat().st_mtime_ns, file.read_text()))
        except FileNotFoundError:  # a rank that starts again has just removed it
            continue
    for file in run_dir.glob(HELD):
        with suppress(FileNotFoundError):
            if dump := file.read_text(errors="replace"):
                word = f"{_told_of(file, dump)}\nexit code {NO_PROGRESS}"
                found.append((file.stat().st_mtime_ns, word))
    if not found:
        return None
    lines = min(found)[1].splitlines()
    code = lines[1].removeprefix("exit code ") if len(lines) > 1 else ""
    return ExitReport(lines[0] if lines else "", int(code) if code.isdigit() else USER_ERROR)
