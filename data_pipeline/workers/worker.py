"""Parent-side handle of a worker process: start, call, kill.

The process runs `workers.worker_main`.
"""

import contextlib
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_pipeline.workers.shm_transport import ReceivedMessage, Receiver, send_bytes
from data_pipeline.workers.worker_main import FAILED, LEFT_TO_PARENT, READY

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from data_pipeline.workers.worker_main import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_ROOT = str(Path(__file__).resolve().parent.parent.parent)
# Several workers with one thread per core each would only compete for the cores.
_ONE_THREAD = {
    name: "1"
    for name in (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    )
}
# Interval of liveness checks while waiting. They are needed because a child process of the job may
# hold the socket open after the worker has died.
_LOOK_S = 1.0
# A killed process exits at once unless it waits for a device or a network file system.
_KILL_S = 5.0


class WorkerLost(Exception):
    """The worker process has exited or is exiting."""


class Worker:
    """One worker process.

    Args:
        setup: pickled; called in the worker before the first job.
    """

    def __init__(self, setup: bytes):
        self._sock, theirs = socket.socketpair()
        self._receiver = Receiver(self._sock)
        self._setup: bytes | None = setup
        command = [sys.executable, "-P", "-c", _BOOT, _ROOT]
        try:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
            )
        except BaseException:
            self._sock.close()
            raise
        finally:
            theirs.close()

    def call(self, job: bytes) -> Any:
        """Run a pickled job; return its result.

        Raises:
            WorkerLost: the worker exited meanwhile.
            OSError: this process has no descriptors or no memory left to receive the result.
            Exception: an exception of `setup` or the job, with its traceback as `__cause__`.
        """
        try:
            if self._setup is not None:
                self._handshake(self._setup)
                self._setup = None
            send_bytes(self._sock, pickle.dumps((self._receiver.released(), job), protocol=5))
            body = self._receive()
        except (EOFError, ConnectionError) as error:
            raise WorkerLost from error
        except OSError:  # the message was only partly received, so the stream is out of sync
            self.end()
            raise
        outcome, content = body.load()
        if outcome == FAILED:
            raise content.error()
        return content

    def _handshake(self, setup: bytes) -> None:
        path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
        send_bytes(self._sock, pickle.dumps(path))
        send_bytes(self._sock, setup)
        answer, *content = self._receive().load()
        if answer != READY:
            self.end()
            error: Exception = content[0].error()
            error.add_note("raised while a worker made ready: by `setup`, or by its import")
            raise error

    def _receive(self) -> ReceivedMessage:
        readable = select.poll()
        readable.register(self._sock, select.POLLIN)
        while not readable.poll(_LOOK_S * 1000):
            if self.process.poll() is not None:
                raise EOFError("the worker is dead")
        return self._receiver.receive()

    def shutdown(self) -> None:
        """Close the socket, so that the worker exits and a thread in `call` gets `WorkerLost`."""
        # `close` would not wake a thread that waits in `recv`.
        with contextlib.suppress(OSError):  # no longer connected
            self._sock.shutdown(socket.SHUT_RDWR)

    def join(self, deadline: float) -> None:
        """Wait for the worker's exit until `deadline` (monotonic clock, s), then kill it."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()

    def close(self) -> None:
        """Close the socket; no thread may be in `call`."""
        self.shutdown()
        self._sock.close()

    def end(self) -> None:
        """Kill the worker and wait for its exit."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILL_S)

    def kill(self) -> None:
        """Kill the worker without waiting."""
        self.process.kill()
        self.shutdown()

    def exit_text(self) -> str:
        """Return a description of the worker's exit."""
        code = self.process.returncode
        if code is None:
            return f"(process {self.process.pid}) was killed but does not end"
        if code >= 0:
            return f"(process {self.process.pid}) ended with exit code {code}"
        known = {int(number): number.name for number in signal.Signals}
        name = known.get(-code, "unknown")
        hint = ", as when a machine or container is out of memory" if name == "SIGKILL" else ""
        return f"(process {self.process.pid}) was ended by signal {-code} ({name}{hint})"


def pickled(value: object, what: Callable[[], str]) -> bytes:
    """Pickle a value for a worker; `what` names it in messages.

    Raises:
        ValueError: the value cannot be pickled, or is defined in the main script, which workers do
            not import.
    """
    try:
        data = pickle.dumps(value, protocol=5)
    except Exception as error:
        raise ValueError(
            f"{what()} cannot be sent to a worker process: {error}. It has to pickle: functions by "
            f"the name of a module (no lambda, no function inside a function), no open files or "
            f"locks. Or use num_workers=0"
        ) from error
    if b"__main__" in data:
        _NotMain(io.BytesIO(data), what()).load()
    return data


class _NotMain(pickle.Unpickler):
    """Refuses references to `__main__`, which only unpickling can detect."""

    def __init__(self, file: io.BytesIO, what: str):
        super().__init__(file)
        self._what = what

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            raise ValueError(
                f"{self._what} refers to {name!r} of the main script, which workers do not import: "
                f"move it to a module of its own and import it, or use num_workers=0"
            )
        return super().find_class(module, name)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals of terminal and scheduler in this thread.

    A process started meanwhile inherits the mask, so that no signal can end it before it ignores
    these signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
