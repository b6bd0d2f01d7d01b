"""Plants a fault in a process that has imported our code already, or traces what a test reaches.

A fork of a process with torch takes milliseconds where a start takes seconds. So the fault is put
into the functions that are there: each gets the code object of the changed file, whoever holds the
function. Processes that start later read the changed file. Both are told by environment variables,
so that what a test starts has the fault too (`tests/fork_server.py`, and the `sitecustomize.py`
that `tests.mutants.worker` puts into its copy of the tree).
"""

import gc
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

# The changed file, a copy of it as it was, and the root of the tree.
FAULT = "KIMI_PRETRAIN_FAULT"
# A file that takes "tag path line" of every line reached, and the files to watch.
TRACE = "KIMI_PRETRAIN_TRACE"
# Set where faults will be planted: `tests.fork_server` notes its functions.
INDEX = "KIMI_PRETRAIN_INDEX"
_functions: dict[str, list[FunctionType]] = {}


def index(root: Path) -> None:
    """Note all functions of our files: before `gc.freeze`, which hides them, and before forks."""
    _functions.clear()
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(str(root)):
            _functions.setdefault(one.__code__.co_filename, []).append(one)


def begin() -> None:
    """Do what the environment asks for; called in a new process."""
    if FAULT in os.environ and _functions:
        file, before = os.environ[FAULT].split(os.pathsep)
        plant(file, Path(before).read_bytes(), Path(file).read_bytes())
    if TRACE in os.environ:
        output, *files = os.environ[TRACE].split(os.pathsep)
        Tracer(output, files).start()


def plant(file: str, before: bytes, after: bytes) -> int:
    """Give functions of a file the code that they have in another text; returns how many."""
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
    """Whether functions can take the changed code: it needs the same variables from outside."""
    pairs = list(_pairs(compile(before, "", "exec"), compile(after, "", "exec")))
    return all(old.co_freevars == new.co_freevars for old, new in pairs)


def _pairs(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]]:
    inner = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new)]
    names = [[one.co_name for one in some] for some in inner]
    pairs = [(old, new)]
    if names[0] == names[1]:  # else a function inside went with a statement: the outer one has it
        for some in zip(*inner):
            pairs += _pairs(*some)
    return pairs


class Tracer:
    """Writes each line of some files that is reached, once for each tag.

    Attributes:
        tag: the test that runs; "*" in other processes, and before tests.
    """

    def __init__(self, output: str, files: list[str]):
        self._output = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._files = frozenset(files)
        self.tag = "*"
        self._seen: set[tuple[str, str, int]] = set()

    def start(self) -> None:
        """Trace this thread and those that start later."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, given: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, given: Any) -> Any:
        if event == "line":
            found = self.tag, frame.f_code.co_filename, frame.f_lineno
            if found not in self._seen:
                self._seen.add(found)
                os.write(self._output, "{}\t{}\t{}\n".format(*found).encode())
        return self._line
