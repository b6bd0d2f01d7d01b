"""Plants a fault in a process that has imported our code, or traces the lines a test reaches.

A fork of a process with torch takes milliseconds; a start takes seconds. A fault is therefore put
into existing functions: each function object gets the code object of the changed file. Processes
that start later read the changed file. Environment variables control both, so that processes
started by a test have the fault too (see `tests/fork_server.py`, and the `sitecustomize.py` that
`tests.mutants.worker` puts into its copy of the tree).
"""

import gc
import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

# The changed file and a copy of the original.
FAULT = "KIMI_PRETRAIN_FAULT"
# An output file for "tag path line" of every watched line reached, and a file with these lines.
TRACE = "KIMI_PRETRAIN_TRACE"
# Set where faults will be planted; makes `tests.fork_server` index its functions.
INDEX = "KIMI_PRETRAIN_INDEX"
_functions: dict[str, list[FunctionType]] = {}


def index(root: Path) -> None:
    """Index all functions of our files; call it before forks and `gc.freeze`, which hides them."""
    _functions.clear()
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(str(root)):
            _functions.setdefault(one.__code__.co_filename, []).append(one)


def begin() -> None:
    """Plant or trace as the environment requests; called in a new process."""
    if FAULT in os.environ and _functions:
        file, before = os.environ[FAULT].split(os.pathsep)
        plant(file, Path(before).read_bytes(), Path(file).read_bytes())
    if TRACE in os.environ:
        Tracer(*os.environ[TRACE].split(os.pathsep)).start()


def plant(file: str, before: bytes, after: bytes) -> int:
    """Give a file's functions the code of a changed text; return how many were changed."""
    changes = dict(
        (old, new)
        for old, new in _pairs(compile(before, file, "exec"), compile(after, file, "exec"))
        if old != new
    )
    changed = 0
    for function in _functions.get(file, ()):
        if (new := changes.get(function.__code__)) is not None:
            function.__code__ = new
            changed += 1
    return changed


def fits(before: bytes, after: bytes) -> bool:
    """Return whether functions can take the changed code, which needs the same free variables."""
    pairs = list(_pairs(compile(before, "", "exec"), compile(after, "", "exec")))
    return all(old.co_freevars == new.co_freevars for old, new in pairs)


def _pairs(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]]:
    inner = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new)]
    names = [[one.co_name for one in some] for some in inner]
    pairs = [(old, new)]
    if names[0] == names[1]:  # else the fault dropped an inner function, so the outer code differs
        for some in zip(*inner):
            pairs += _pairs(*some)
    return pairs


class Tracer:
    """Writes each reached line among the watched lines, once per tag.

    A function is traced only until all its watched lines were reached, so that hot code stays fast.

    Args:
        output: file that receives the lines.
        watched: JSON file that maps each file to its lines.

    Attributes:
        tag: the running test; "*" in other processes and before tests.
    """

    def __init__(self, output: str, watched: str):
        self._output = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        lines = json.loads(Path(watched).read_text())
        self._watched = {file: frozenset(some) for file, some in lines.items()}
        self.tag = "*"
        self._left: dict[tuple[str, CodeType], set[int]] = {}

    def start(self) -> None:
        """Trace this thread and threads that start later."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, given: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._watched:
            return None
        key = self.tag, code
        if key not in self._left:
            own = {line for _, _, line in code.co_lines() if line is not None}
            self._left[key] = own & self._watched[code.co_filename]
        return self._line if self._left[key] else None

    def _line(self, frame: FrameType, event: str, given: Any) -> Any:
        line, code = frame.f_lineno, frame.f_code
        left = self._left.get((self.tag, code), ())
        if event == "line" and line in left:
            left.discard(line)
            os.write(self._output, f"{self.tag}\t{code.co_filename}\t{line}\n".encode())
        return self._line if left else None
