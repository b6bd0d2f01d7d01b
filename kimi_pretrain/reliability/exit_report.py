"""The one line that a rank leaves behind when it ends before its time: what the user is shown.

    logs/error_rank_3.txt       the line, and below it the exit code that goes with it
    logs/held_rank_3.txt        of a process that could run no Python any more: its stacks

Who watches the processes (`launch.local.supervise`, a batch script) shows the first one's line and
ends with its code, because torchrun tells neither. Exit codes: 2 is the user's to mend and will
come again after a restart; 75 (EX_TEMPFAIL of sysexits.h) is a run that made no progress; any other
(1) a fault worth a restart.
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
USERS_TO_MEND = 2
NO_PROGRESS = 75
WORDS = "logs/error_rank_*.txt"
HELD = "logs/held_rank_*.txt"


class StepFault(RuntimeError):
    """A fault of this program in a step: says which error was met."""


def is_nobodys(error: BaseException) -> bool:
    """Whether an error is a ValueError of none of this project's classes."""
    ours = type(error).__module__.partition(".")[0] in ROOMS
    return isinstance(error, ValueError) and not ours


@contextmanager
def nobodys_mistake() -> Iterator[None]:
    """Turn a ValueError that is none of this project's classes into a `StepFault`.

    Before the first step such an error is how a check refuses a value of the user's. In a step it
    is a bug, of ours or of a library's: it keeps its traceback, and is worth a restart.
    """
    try:
        yield
    except ValueError as error:
        if not is_nobodys(error):
            raise
        raise StepFault(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class LastWord:
    """Why a rank ended.

    Attributes:
        message: one line.
        code: exit code of the process.
    """

    message: str
    code: int = USERS_TO_MEND


def error_file(run_dir: Path, rank: int) -> Path:
    """Return where a rank leaves its last word."""
    return run_dir / "logs" / f"error_rank_{rank}.txt"


def held_file(run_dir: Path, rank: int) -> Path:
    """Return where a C thread leaves the stacks of a rank in which no Python can run."""
    return run_dir / "logs" / f"held_rank_{rank}.txt"


def open_held(run_dir: Path, rank: int) -> int:
    """Return a file descriptor of that, empty: as long as it is there is nothing to tell."""
    file = held_file(run_dir, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)


def _told_of(file: Path, dump: str) -> str:
    """Return one line for what faulthandler wrote of a process that was held."""
    *_, main = dump.split("(most recent call first):")  # the main thread comes last
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', main)
    at = where([(path, int(number), name) for path, number, name in frames])
    rank = file.stem.removeprefix("held_rank_")
    return (
        f"no progress (train.timeout_seconds): rank {rank} is in C code that keeps Python's lock, "
        f"at {at}; all stacks are in {file}"
    )


def leave_word(run_dir: Path, rank: int, word: LastWord) -> None:
    """Write a rank's last word; where that cannot be done, its standard error has to do."""
    file = error_file(run_dir, rank)
    message = " ".join(word.message.split())
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, f"{message}\nexit code {word.code}\n")


def forget_word(run_dir: Path, rank: int) -> None:
    """Remove what this rank said in an earlier attempt."""
    error_file(run_dir, rank).unlink(missing_ok=True)


def forget_words(run_dir: Path) -> None:
    """Remove what all ranks said in an earlier run, before this one has any.

    Several machines may do this at the same time.
    """
    for words in (WORDS, HELD):
        for file in run_dir.glob(words):
            file.unlink(missing_ok=True)


def first_word(run_dir: Path) -> LastWord | None:
    """Return the last word of the rank that ended first; None if none left any."""
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
    return LastWord(lines[0] if lines else "", int(code) if code.isdigit() else USERS_TO_MEND)
