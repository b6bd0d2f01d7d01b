"""The one line that a rank leaves behind when it ends before its time: what the user is shown.

    logs/error_rank_3.txt       the line, and below it the exit code that goes with it

Who watches the processes (`launch.supervise`, a batch script) shows the first one's line and ends
with its code, because torchrun tells neither. Exit codes: 2 is the user's to mend and will come
again after a restart; 75 (EX_TEMPFAIL of sysexits.h) is a run that made no progress; any other (1)
a fault worth a restart.
"""

from dataclasses import dataclass
from pathlib import Path

FAULT = 1
USERS_TO_MEND = 2
NO_PROGRESS = 75
WORDS = "logs/error_rank_*.txt"


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


def leave_word(run_dir: Path, rank: int, word: LastWord) -> None:
    """Write a rank's last word."""
    file = error_file(run_dir, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    message = " ".join(word.message.split())
    file.write_text(f"{message}\nexit code {word.code}\n")


def forget_word(run_dir: Path, rank: int) -> None:
    """Remove what this rank said in an earlier attempt."""
    error_file(run_dir, rank).unlink(missing_ok=True)


def forget_words(run_dir: Path) -> None:
    """Remove what all ranks said in an earlier run, before this one has any.

    Several machines may do this at the same time.
    """
    for file in run_dir.glob(WORDS):
        file.unlink(missing_ok=True)


def first_word(run_dir: Path) -> LastWord | None:
    """Return the last word of the rank that ended first; None if none left any."""
    found: list[tuple[int, str]] = []
    for file in run_dir.glob(WORDS):
        try:
            found.append((file.stat().st_mtime_ns, file.read_text()))
        except FileNotFoundError:  # a rank that starts again has just removed it
            continue
    if not found:
        return None
    lines = min(found)[1].splitlines()
    code = lines[1].removeprefix("exit code ") if len(lines) > 1 else ""
    return LastWord(lines[0] if lines else "", int(code) if code.isdigit() else USERS_TO_MEND)
