"""Runs commands as forks of one process that has imported torch and Megatron-Core.

To start Python with both takes five seconds of a core, a fork of a process that has them a
hundredth of one. A command runs as `python ...` would: with arguments, environment, folder, output
and exit code (or signal) of its own. The server has one thread and has computed nothing, so no test
sees another's state. Where the start itself is tested (torchrun, signals) it stays a real one.
"""

import atexit
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import ModuleType
from typing import IO, Any

import psutil

from launch.local.job import MEETING
from tests import ROOT

_LARGEST = 1 << 18  # bytes of a message: a command and its environment
_LINGER_S = 5.0  # that the other ranks of a job have when one has failed


class Fork:
    """A command that runs."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(connection.recv(64))

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, or the negative number of the signal; None if it still runs."""
        self._connection.settimeout(max(timeout, 1e-3))
        try:
            return int(self._connection.recv(64))
        except TimeoutError:
            return None

    def kill(self) -> None:
        """End it, and whatever it has started."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            for process in (root, *root.children(recursive=True)):
                process.kill()


@cache
def _server() -> socket.socket:
    """Return the connection to this process's server, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LARGEST)
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.fork_server", str(theirs.fileno())],
        pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT, env=environment,
    )  # fmt: skip
    theirs.close()
    atexit.register(lambda: (ours.shutdown(socket.SHUT_RDWR), server.wait()))
    return ours


def start(
    arguments: Sequence[str],
    output: IO[Any],
    errors: IO[Any],
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Fork:
    """Start `python ARGUMENTS`: a script, or a module by -m, or code by -c."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    values = {**os.environ, "PYTHONWARNINGS": "ignore", **(environment or {})}
    job = {"arguments": list(arguments), "environment": values, "cwd": str(cwd)}
    message = json.dumps(job).encode()
    assert len(message) < _LARGEST, len(message)
    files = [theirs.fileno(), output.fileno(), errors.fileno()]
    socket.send_fds(_server(), [message], files)
    theirs.close()
    return Fork(ours)


def run(arguments: Sequence[str], timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end; see `start`.

    Raises:
        subprocess.TimeoutExpired: it took longer; it is ended.
    """
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        fork = start(arguments, output, errors, **more)
        code = fork.wait(timeout)
        told = [file.seek(0) or file.read() for file in (output, errors)]
        if code is None:
            fork.kill()
            raise subprocess.TimeoutExpired(arguments, timeout, *told)
    return subprocess.CompletedProcess(list(arguments), code, *told)


def run_ranks(
    commands: Sequence[Sequence[str]], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run the ranks of a job, one command each, which meet in a private folder as torchrun's do.

    When one fails the others are ended a little later.

    Raises:
        subprocess.TimeoutExpired: it took longer; all are ended.
    """
    end, codes = time.monotonic() + timeout, dict[int, int]()
    world = str(len(commands))
    with TemporaryFile("w+") as output, TemporaryDirectory() as folder:
        forks = [
            start(command, output, output, {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world, MEETING: folder, "GLOO_SOCKET_IFNAME": "lo",
            })
            for rank, command in enumerate(commands)
        ]  # fmt: skip
        try:
            while len(codes) < len(forks) and time.monotonic() < end:
                for rank in set(range(len(forks))) - codes.keys():
                    if (code := forks[rank].wait(0.02)) is not None:
                        codes[rank] = code
                        end = min(end, time.monotonic() + _LINGER_S) if code else end
        finally:
            for rank in set(range(len(forks))) - codes.keys():
                forks[rank].kill()
        output.seek(0)
        told = output.read()
    failed = [code for code in codes.values() if code]
    if not failed and len(codes) < len(forks):
        raise subprocess.TimeoutExpired(list(commands[0]), timeout, told)
    return subprocess.CompletedProcess(list(commands[0]), failed[0] if failed else 0, told, "")


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every message; returns in each fork, with its message, and at the end with None."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of a process
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if ready in running:
                pid, connection = running.pop(ready)
                waiting.unregister(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):  # nobody waits any more
                    connection.send(str(code).encode())
                connection.close()
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _LARGEST, 3)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                control.close()
                os.dup2(descriptors[1], 1)
                os.dup2(descriptors[2], 2)
                for descriptor in (*descriptors, *running):
                    os.close(descriptor)
                for _, connection in running.values():
                    connection.close()
                return json.loads(message)
            connection = socket.socket(fileno=descriptors[0])
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            connection.send(str(pid).encode())
            watched = os.pidfd_open(pid)
            running[watched] = pid, connection
            waiting.register(watched, select.POLLIN)


def become(job: dict[str, Any]) -> None:
    """Be the process that was asked for."""
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    what, *rest = job["arguments"]
    if what in ("-m", "-c"):
        sys.argv = [what if what == "-c" else rest[0], *rest[1:]]
        if what == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    import_module("tests.preloaded")
    threads = {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}
    # A fork has one thread alone. jemalloc (of pyarrow) minds forks, and starts its own again.
    assert len(threads - {"jemalloc_bg_thd"}) == threading.active_count() == 1, threads
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        become(asked)
