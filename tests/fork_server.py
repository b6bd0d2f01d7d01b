"""Runs commands as forks of one process that has imported torch and Megatron-Core.

Starting Python with both imports takes five core seconds; a fork takes a hundredth of a second. A
command runs as it would under `python ...`, with separate arguments, environment, folder, output
and exit code (or signal). The server has one thread and has computed nothing, so tests share no
state. Where a fork starts torchrun, a small script replaces it and its ranks are forks too; jobs
that restart ranks use the real torchrun. Tests of the start-up (`started`, the campaign) use real
processes.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fcntl import LOCK_EX, flock
from functools import cache, partial
from importlib import import_module
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import ModuleType
from typing import IO, Any, NoReturn

import psutil

from launch.local import torchrun
from launch.local.job import MEETING
from tests import ROOT
from tests.mutants import plant

_LARGEST = 1 << 18  # bytes of a message, which holds a command and its environment
_SERVERS = 2
_SHARED = "KIMI_PRETRAIN_TEST_FORKS"
_turns = count()
_LINGER_S = 5.0  # grace period of the other ranks after one rank has failed

# torchrun starts this script instead of Python (PYTHON_EXEC). The script requests a fork, forwards
# signals to it and exits with its exit code. It names its process after the fork. If the script is
# killed, the server kills the fork.
_STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({address!r} + str(int(os.environ.get("RANK", "0")) % 2))
job = dict(arguments=sys.argv[1:], environment=dict(os.environ), cwd=os.getcwd())
socket.send_fds(connection, [json.dumps(job).encode()], [1, 2])
pid = int(connection.recv(64))
def hand_on(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has just ended
        pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, hand_on)
open("/proc/self/comm", "w").write(f"fork {{pid}}")  # from now on a signal may come
code = int(connection.recv(64))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""

# A fork starts this script instead of torchrun, whose import of torch costs 2 s of a core.
_TORCHRUN = """#!{python} -IS
import os, signal, subprocess, sys, time
options = dict(word[2:].split("=", 1) for word in sys.argv if word[:2] == "--" and "=" in word)
world = options["nproc-per-node"]
if options["max-restarts"] != "0" or options["nnodes"] != "1":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
own = dict(WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, TORCHELASTIC_RUN_ID=options["rdzv-id"])
ranks = [
    subprocess.Popen(
        [os.environ["PYTHON_EXEC"], "-m", *sys.argv[-2:]],
        env=dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), **own),
    )
    for rank in range(int(world))
]
def end(*_):
    for rank in ranks:
        rank.terminate()
signal.signal(signal.SIGTERM, end)
while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
    time.sleep(0.02)
if any(codes):
    failed = [(rank, code) for rank, code in enumerate(codes) if code]
    print(*(f"rank: {{rank}} exitcode: {{code}}" for rank, code in failed), file=sys.stderr)
    end()
    for rank in ranks:
        try:
            rank.wait(30)
        except subprocess.TimeoutExpired:
            rank.kill()
    sys.exit(1)
"""


class Fork:
    """A running command."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(connection.recv(64))

    def wait(self, timeout: float) -> int | None:
        """Return the exit code or the negative signal number; None if the command still runs."""
        self._connection.settimeout(max(timeout, 1e-3))
        try:
            return int(self._connection.recv(64))
        except TimeoutError:
            return None

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def share() -> Path:
    """Return the folder of the servers, shared by this process and all processes it starts.

    pytest's main process calls it first, so that its workers share the servers.
    """
    if _SHARED not in os.environ:
        folder = TemporaryDirectory(prefix="forks-")
        os.mkfifo(f"{folder.name}/open")
        held = os.open(f"{folder.name}/open", os.O_RDWR)  # the servers exit when this is closed
        os.environ[_SHARED] = folder.name
        atexit.register(lambda: (os.close(held), folder.cleanup()))
    return Path(os.environ[_SHARED])


@cache
def _servers() -> Path:
    """Start the servers unless they run already; return their folder.

    The two servers have different string hash seeds, which forks inherit. Neighbouring ranks and
    successive runs therefore iterate over sets of strings in different orders, as real processes
    do.
    """
    folder = share()
    stand_in = folder / "python"
    with open(folder / "lock", "w") as lock:
        flock(lock, LOCK_EX)
        if not stand_in.exists():
            for number in range(_SERVERS):  # left by a starter that was killed
                (folder / f"server{number}").unlink(missing_ok=True)
            _start_servers(folder)
            for file, text in ((folder / "torchrun", _TORCHRUN), (stand_in, _STAND_IN)):
                file.write_text(text.format(python=sys.executable, address=f"{folder}/server"))
                file.chmod(0o700)
    return folder


def _start_servers(folder: Path) -> None:
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    with open(folder / "open") as held:
        servers = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.fork_server", str(folder / f"server{number}")],
                stdin=held, stdout=subprocess.PIPE, cwd=ROOT,
                env=environment | {"PYTHONHASHSEED": str(number + 1)},
            )
            for number in range(_SERVERS)
        ]  # fmt: skip
    for server in servers:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"


def python() -> Path:
    """Return the path of a command that behaves like Python but runs as a fork."""
    return _servers() / "python"


def start(
    arguments: Sequence[str],
    output: IO[Any],
    errors: IO[Any],
    environment: Mapping[str, str] | None = None,
    server: int = 0,
) -> Fork:
    """Start `python ARGUMENTS`, which is a script, a module (-m) or code (-c).

    Args:
        server: index of the server that forks, modulo the number of servers.
    """
    own = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    own["PYTHON_EXEC"] = str(python())  # read by torchrun
    values = {**os.environ, **own, **(environment or {})}
    job = {"arguments": list(arguments), "environment": values, "cwd": str(ROOT)}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(_servers() / f"server{server % _SERVERS}"))
    files = [output.fileno(), errors.fileno()]
    socket.send_fds(connection, [json.dumps(job).encode()], files)
    return Fork(connection)


def run(arguments: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to completion; see `start`.

    Raises:
        subprocess.TimeoutExpired: the command took longer; it is killed.
    """
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        fork = start(arguments, output, errors, server=next(_turns))
        try:
            code = fork.wait(timeout)
        except BaseException:
            fork.kill()
            raise
        told = [file.seek(0) or file.read() for file in (output, errors)]
        if code is None:
            fork.kill()
            raise subprocess.TimeoutExpired(arguments, timeout, *told)
    return subprocess.CompletedProcess(list(arguments), code, *told)


def run_ranks(
    commands: Sequence[Sequence[str]], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run one command per rank of a job. The ranks meet in a private folder, as under torchrun.

    When a rank fails, the others are killed a few seconds later.

    Raises:
        subprocess.TimeoutExpired: the job took longer; all ranks are killed.
    """
    end, codes = time.monotonic() + timeout, dict[int, int]()
    world = str(len(commands))
    with TemporaryFile("w+") as output, TemporaryDirectory() as folder:
        forks: list[Fork] = []
        try:
            for rank, command in enumerate(commands):
                environment = {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world,
                    "LOCAL_WORLD_SIZE": world, MEETING: folder, "GLOO_SOCKET_IFNAME": "lo",
                }  # fmt: skip
                forks.append(start(command, output, output, environment, server=rank))
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


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for every message; return it in the fork. Return None in the server at the end."""
    running: dict[int, tuple[int, int, socket.socket]] = {}  # keyed by both descriptors to poll
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    waiting.register(0, select.POLLIN)  # closed when the tests have ended
    while True:
        for ready, _ in waiting.poll():
            if ready == 0:
                for pid, _, _ in {entry[0]: entry for entry in running.values()}.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            if ready == listener.fileno():
                connection, _ = listener.accept()
                message, files, _, _ = socket.recv_fds(connection, _LARGEST, 2)
                if len(files) != 2:  # the client exited before it sent its job
                    connection.close()
                    continue
                output, errors = files
                pid = os.fork()
                if pid == 0:
                    for file, number in ((output, 1), (errors, 2)):
                        os.dup2(file, number)
                    for file in (output, errors, connection.fileno(), listener.fileno(), *running):
                        os.close(file)
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    return json.loads(message)
                os.close(output)
                os.close(errors)
                with suppress(
                    OSError
                ):  # the client has exited; the poll below notices and kills the fork
                    connection.send(str(pid).encode())
                entry = pid, os.pidfd_open(pid), connection
                for watched in (entry[1], connection.fileno()):
                    running[watched] = entry
                    waiting.register(watched, select.POLLIN)
            elif ready in running:
                pid, ended, connection = running[ready]
                if ready == connection.fileno():  # the client has exited
                    os.kill(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError):
                    connection.send(str(code).encode())
                for watched in (ended, connection.fileno()):
                    del running[watched]
                    waiting.unregister(watched)
                os.close(ended)
                connection.close()


def become(job: dict[str, Any]) -> None:
    """Run the requested command in this process."""
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    plant.begin()
    if python := os.environ.get("PYTHON_EXEC"):
        script = str(Path(python).with_name("torchrun"))
        torchrun.command = partial(torchrun.command, python=script)
    what, *rest = [one for one in job["arguments"] if one != "-u"]
    if what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv = [what, *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")


def end(job: dict[str, Any]) -> NoReturn:
    """Run the job and exit like Python, but without module teardown, which would copy pages."""
    code: object = 0
    try:
        become(job)
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    import_module("tests.preloaded")
    threads = {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}
    # A fork keeps only the calling thread. jemalloc (in pyarrow) handles forks and restarts its
    # thread.
    assert len(threads - {"jemalloc_bg_thd"}) == threading.active_count() == 1, threads
    doors = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    doors.bind(sys.argv[1])
    doors.listen(64)
    if plant.INDEX in os.environ:
        plant.index(ROOT)
    gc.freeze()  # forks do not collect these objects, so their pages stay shared
    print("ready", flush=True)
    asked = serve(doors)
    if asked is None:
        os._exit(0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    end(asked)
