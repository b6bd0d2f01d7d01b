"""JSON-lines files with a line, or several, for a step, in the order of steps.

After 100,000 steps of a large job metrics.jsonl has gigabytes, and a run is started again hundreds
of times: what a start does with such a file must not grow with it.
"""

import json
import os
from pathlib import Path

_BLOCK = 1 << 16


def forget_after(file: Path, step: int) -> None:
    """Drop the lines that belong to later steps, and a torn last line.

    Reads no more than these lines and one before them; the file is cut in one go, so that a run
    that is killed just now leaves it as it was or as it shall be.

    Raises:
        ValueError: a line is none of a step.
    """
    if not file.is_file():
        return
    fd = os.open(file, os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        end = _after_newline(fd, size)
        while end:
            start = _after_newline(fd, end - 1)
            if _step_of(os.pread(fd, end - start, start), file, start) <= step:
                break
            end = start
        if end != size:
            os.ftruncate(fd, end)
            os.fsync(fd)
    finally:
        os.close(fd)


def _after_newline(fd: int, end: int) -> int:
    """Return the place after the last newline before `end`; 0 if there is none."""
    while end > 0:
        begin = max(0, end - _BLOCK)
        if at := os.pread(fd, end - begin, begin).rfind(b"\n") + 1:
            return begin + at
        end = begin
    return 0


def _step_of(line: bytes, file: Path, start: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: the line that begins at byte {start} is not that of a step ({error!r}); "
            "repair or remove it, then resume"
        ) from None
