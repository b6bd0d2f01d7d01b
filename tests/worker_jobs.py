"""Jobs for the tests of workers, in a module that worker processes can import."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


def arrays_of(seed: int) -> dict[str, Any]:
    """Return arrays of many kinds, up to 1 MiB in total, some read-only, strided or empty."""
    rng = np.random.default_rng([7, seed])
    size = int(rng.integers(0, 200_000))
    frozen = rng.integers(0, 9, 1000)
    frozen.flags.writeable = False
    return {
        "bytes": rng.bytes(100),
        "patches": rng.integers(0, 255, (size, 3), dtype=np.uint8),
        "fortran": np.asfortranarray(rng.random((50, 70))),
        "strided": rng.random((40, 60))[::2, 5:],
        "half": rng.random(size // 4).astype(np.float16),
        "empty": np.zeros((0, 3), np.int64),
        "scalar": np.array(seed),
        "frozen": frozen,
        "record": np.zeros(3, [("a", "i4"), ("b", "f8")]),
        "seed": seed,
    }


@dataclass(frozen=True)
class Sleepy:
    """Job that sleeps, then returns `arrays_of(seed)`."""

    seed: int
    sleep_s: float = 0.0


def do_sleepy(job: Sleepy) -> dict[str, Any]:
    time.sleep(job.sleep_s)
    return arrays_of(job.seed)


def sleepy() -> Callable[[Sleepy], dict[str, Any]]:
    return do_sleepy


def calls() -> Callable[[Callable[[], Any]], Any]:
    """Return a worker function that calls its job, a function without arguments."""
    return lambda job: job()


class Unpicklable(Exception):
    """Pickles, but cannot be rebuilt from its message alone."""

    def __init__(self, number: int, name: str):
        super().__init__(f"{name} is {number}")


class Doubled(Exception):
    """Can be rebuilt, but with a different message."""

    def __init__(self, name: str):
        super().__init__(f"no {name}")


class Ends(BaseException):
    """A BaseException that is no Exception."""


def throw(kind: str) -> None:
    raise {
        "value": ValueError("no 7"),
        "unpicklable": Unpicklable(7, "x"),
        "doubled": Doubled("bread"),
        "stop": StopIteration(7),
        "exit": SystemExit(3),
        "base": Ends("enough"),
    }[kind]


def a_lock() -> Any:
    return threading.Lock()


def environment() -> dict[str, str]:
    return dict(os.environ)


def touch_later(file: Path, after_s: float) -> None:
    time.sleep(after_s)
    file.touch()


def broken_setup() -> Callable[[Any], Any]:
    raise FileNotFoundError("no bucket 'b'")


def memory_files() -> int:
    """Return the number of shared-memory segments that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:shm_transport")


def die(how: str, marks: Path, times: int) -> str:
    """Die on the first `times` attempts; `marks` holds one file per attempt."""
    attempt = len(list(marks.iterdir()))
    (marks / f"{attempt}-{os.getpid()}").touch()
    if attempt >= times:
        return "alive"
    if how == "crash":
        ctypes.string_at(0)
    if how == "exit":
        os._exit(5)
    if how == "orphan":  # a child process keeps the worker's socket open
        child = os.fork()
        if child == 0:
            time.sleep(80)
            os._exit(0)
        (marks / f"{attempt}-{os.getpid()}").write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(80)
    return "unreachable"


def hang(marks: Path) -> None:
    (marks / f"{os.getpid()}").touch()
    time.sleep(80)
