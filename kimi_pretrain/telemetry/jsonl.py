"""JSON-lines files with one or more lines per step, in step order.

After 100,000 steps of a large job metrics.jsonl has gigabytes, and a run is restarted hundreds of
times, so the work of a start must not grow with the file.
"""

import json
import os
from pathlib import Path

from kimi_pretrain.reliability.run_files import naming

_BLOCK = 1 << 16


def abandoned(file: Path) -> Path:
    """Return the path that keeps the lines cut from a file."""
    return file.with_suffix(f".abandoned{file.suffix}")


def cut_after(file: Path, step: int) -> int | None:
    """Move the lines of later steps to `abandoned(file)`, and drop an incomplete last line.

    Reads only these lines and the line before them. The file is truncated in one operation, after
    the moved lines are on disk, so a killed run leaves it either unchanged or complete.

    Args:
        step: the last step whose lines stay; -1 moves all lines.

    Returns:
        the last step whose lines were moved; None if no line was moved.

    Raises:
        ValueError: a line does not belong to a step.
    """
    if not file.is_file():
        return None
    fd = os.open(file, os.O_RDWR)
    try:
        size, last = os.fstat(fd).st_size, None
        whole = end = _after_newline(fd, size)
        while end:
            start, found = _last_line(fd, end, file)
            if found <= step:
                break
            last = found if last is None else last
            end = start if step >= 0 else 0  # all lines move, so no search is needed
        if last is not None:
            _append(fd, end, whole, abandoned(file))
        if end != size:
            os.ftruncate(fd, end)
            os.fsync(fd)
        return last
    finally:
        os.close(fd)


def first_step(file: Path) -> int | None:
    """Return the step of the first line of a file; None if there is no complete line.

    Raises:
        ValueError: the line does not belong to a step.
    """
    if not file.is_file():
        return None
    with file.open("rb") as lines:
        line = lines.readline()
    return _step_of(line, file, 0) if line.endswith(b"\n") else None


def last_step(file: Path) -> int | None:
    """Return the step of the last complete line of a file; None if there is none.

    Raises:
        ValueError: the line does not belong to a step.
    """
    if not file.is_file():
        return None
    fd = os.open(file, os.O_RDONLY)
    try:
        end = _after_newline(fd, os.fstat(fd).st_size)
        return _last_line(fd, end, file)[1] if end else None
    finally:
        os.close(fd)


def _last_line(fd: int, end: int, file: Path) -> tuple[int, int]:
    """Return the offset of the line that ends at `end`, and its step."""
    start = _after_newline(fd, end - 1)
    return start, _step_of(os.pread(fd, end - start, start), file, start)


def _append(fd: int, start: int, end: int, file: Path) -> None:
    """Append bytes [start, end) of `fd` to a file, durably; drop an incomplete line at its end."""
    with naming(file):
        out = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(out).st_size
            if (at := _after_newline(out, size)) != size:
                os.ftruncate(out, at)
            while start < end:
                block = os.pread(fd, min(_BLOCK, end - start), start)
                done = os.pwrite(out, block, at)
                start, at = start + done, at + done
            os.fsync(out)
        finally:
            os.close(out)


def _after_newline(fd: int, end: int) -> int:
    """Return the offset after the last newline before `end`; 0 if there is none."""
    while end > 0:
        begin = max(0, end - _BLOCK)
        if at := os.pread(fd, end - begin, begin).rfind(b"\n") + 1:
            return begin + at
        end = begin
    return 0


def _step_of(line: bytes, file: Path, start: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{file}: the line that begins at byte {start} is not that of a step (want JSON with a "
            "number under 'step'); repair or remove it, then resume"
        ) from None
