"""A running training and its processes, for tests that disturb it from outside."""

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
    """Run `kimi-pretrain train` as a user would; it ends with the test at the latest.

    The command and torchrun are real processes, the ranks are forks (`tests.fork_server`).
    """
    command = [  # -P: like the installed command, which does not import from the working folder
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
    """Return the ranks of a started training."""
    (launcher,) = psutil.Process(process.pid).children()
    return {int(child.environ()["RANK"]): itself(child) for child in launcher.children()}


def itself(process: psutil.Process) -> psutil.Process:
    """Return the fork that a stand-in process represents, or the process."""
    name = process.name()
    return psutil.Process(int(name[5:])) if name.startswith("fork ") else process


def tree(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants, forks included; skip those that end meanwhile."""
    try:
        real = itself(process)
        found = [process] if real == process else [process, real]
        return found + [one for child in real.children() for one in tree(child)]
    except psutil.NoSuchProcess:
        return []


def open_to_others(process: subprocess.Popen) -> list[str]:
    """Return the non-loopback addresses on which the process tree listens."""
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
    """Return whether a signal is pending for a suspended process."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = int(status.partition("\nShdPnd:")[2].split(maxsplit=1)[0], 16)
    return bool(pending >> (number - 1) & 1)


def steps_of(run_dir: Path) -> int:
    """Return the number of metrics lines."""
    with suppress(FileNotFoundError):
        return (run_dir / "metrics.jsonl").read_text().count("\n")
    return 0


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen) -> None:
    """Wait until that many steps are done."""
    wait_for(lambda: steps_of(run_dir) >= steps, process)


def wait_for(true: Callable[[], object], process: subprocess.Popen, seconds: float = 200.0) -> None:
    """Wait until `true()` is true.

    Raises:
        AssertionError: it times out, or the training ends first.
    """
    end = time.monotonic() + seconds
    while not true():
        if process.poll() is not None:
            raise AssertionError("".join(process.communicate()))
        assert time.monotonic() < end, "in vain"
        time.sleep(0.05)
