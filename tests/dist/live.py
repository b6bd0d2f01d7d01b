"""A training that is going on, and its processes: for what happens to it from outside."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from launch.local import supervise
from tests import ROOT, fork_server
from tests.dist.jobs import SMALL


@contextmanager
def started(run_dir: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Run `kimi-pretrain train` as a person would; it is ended with the test at the latest.

    The command and torchrun are real ones, the ranks forks (`tests.fork_server`).
    """
    command = [  # -P: as the installed command, which does not look into the working folder
        sys.executable, "-P", "-m", "launch.cli", "train", "--config", "tiny_cpu",
        "--run-dir", str(run_dir), *SMALL, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment["PYTHON_EXEC"] = str(fork_server.python())
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        supervise.stop(process)


def ranks(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """Return the ranks of a training that has begun."""
    (launcher,) = psutil.Process(process.pid).children()
    return {int(child.environ()["RANK"]): itself(child) for child in launcher.children()}


def itself(process: psutil.Process) -> psutil.Process:
    """Return the fork that a process stands in for, or the process."""
    name = process.name()
    return psutil.Process(int(name[5:])) if name.startswith("fork ") else process


def tree(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all that it has started, forks too; what ends meanwhile is left out."""
    try:
        real = itself(process)
        found = [process] if real == process else [process, real]
        return found + [one for child in real.children() for one in tree(child)]
    except psutil.NoSuchProcess:
        return []


def open_to_others(process: subprocess.Popen) -> list[str]:
    """Return what the whole tree of processes listens at beyond the loopback address."""
    found = []
    for member in tree(psutil.Process(process.pid)):
        with suppress(psutil.NoSuchProcess):
            found += [
                f"{one.laddr} of {' '.join(member.cmdline())[:80]}"
                for one in member.net_connections("inet")
                if one.laddr and not one.raddr and one.laddr.ip not in ("127.0.0.1", "::1")
            ]
    return found


def is_told(pid: int, number: signal.Signals) -> bool:
    """Return whether a signal waits for a process that stands still."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = int(status.partition("\nShdPnd:")[2].split(maxsplit=1)[0], 16)
    return bool(pending >> (number - 1) & 1)


def steps_of(run_dir: Path) -> int:
    """Return how many lines of metrics there are."""
    with suppress(FileNotFoundError):
        return (run_dir / "metrics.jsonl").read_text().count("\n")
    return 0


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen) -> None:
    """Wait until so many steps are done."""
    wait_for(lambda: steps_of(run_dir) >= steps, process)


def wait_for(true: Callable[[], object], process: subprocess.Popen, seconds: float = 200.0) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: it does not come to that, or the training ends before.
    """
    end = time.monotonic() + seconds
    while not true():
        if process.poll() is not None:
            raise AssertionError("".join(process.communicate()))
        assert time.monotonic() < end, "in vain"
        time.sleep(0.05)
