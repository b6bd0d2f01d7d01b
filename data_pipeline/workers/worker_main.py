"""Main loop of a worker process: setup, then job after job until the parent exits.

    python -P -c "... main(socket, parent)"

The parent (`workers.worker`) starts it as a fresh interpreter. It is not forked, because threads
and CUDA do not survive a fork, and not started by `multiprocessing`, which imports the main script
again, so that every script needs a guard. A socket is the only connection.

    parent -> worker    sys.path, `setup`, then jobs: (released segments, job)
    worker -> parent    READY, then for each job: (DONE, result) or (FAILED, Failure)

The worker ignores the signals of terminal and scheduler, because the parent may still need data
while it saves its state. It exits when the socket is closed, which also happens if the parent dies.
"""

import faulthandler
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data_pipeline.workers.shm_transport import Sender, receive_bytes

READY, DONE, FAILED = "ready", "done", "failed"

# Signals sent to whole process groups: Ctrl-C, the end of a session, a scheduler's warning.
LEFT_TO_PARENT = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# Grace period of a worker whose parent is gone; a longer job is aborted. Shorter than `CLOSE_S` in
# `workers.workers`.
GRACE_S = 0.5
_LOOK_S = 1.0


class JobError(RuntimeError):
    """A job failed with an exception that cannot be sent or raised; the message names its type."""


class RemoteTraceback(Exception):
    """The traceback of a job in its worker, as text: the `__cause__` of the job's exception."""

    def __str__(self) -> str:
        return f"in the worker:\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """An exception sent to the parent.

    Attributes:
        pickled: the pickled exception, or None if it does not survive pickling.
        summary: type and message.
        text: the traceback.
    """

    pickled: bytes | None
    summary: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe an exception that was caught."""
        return cls(_pickled(error), summary_of(error), "".join(traceback.format_exception(error)))

    def error(self) -> Exception:
        """Return the exception to raise in the parent, of the same type if possible."""
        try:
            error = None if self.pickled is None else pickle.loads(self.pickled)
        except Exception:  # its module may be missing here
            error = None
        if error is None:
            error = JobError(self.summary)
        error.__cause__ = RemoteTraceback(self.text)
        return error


def raisable(error: BaseException) -> Exception:
    """Return an exception that is safe to raise in the consumer of a job's result.

    A job must not end the consumer's loop or process, so StopIteration, SystemExit and the like
    become a JobError.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = JobError(summary_of(error))
    wrapped.__cause__ = error
    return wrapped


def summary_of(error: BaseException) -> str:
    """Return type and message of an exception."""
    return f"{type(error).__name__}: {error}"


def _pickled(error: BaseException) -> bytes | None:
    if raisable(error) is not error:
        return None
    try:
        data = pickle.dumps(error)
        again = pickle.loads(data)
    except Exception:
        return None
    # Many exceptions build their message in __init__ and unpickle with a different one.
    return data if type(again) is type(error) and str(again) == str(error) else None


def main(fd: int, parent: int) -> None:
    """Run the jobs of the parent until it closes its end of the socket.

    Args:
        fd: descriptor of the socket.
        parent: process id of the parent.
    """
    # The parent blocked these signals before it started this process; see `worker.signals_blocked`.
    for number in LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENT)
    faulthandler.enable()
    # Programs started by a job must not hold the socket open.
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    threading.Thread(target=_exit_with_parent, args=(sock, parent), daemon=True).start()
    try:
        _serve(sock)
    except (EOFError, ConnectionError):
        return


def _serve(sock: socket.socket) -> None:
    sender = Sender(sock)
    sys.path[:] = pickle.loads(receive_bytes(sock))
    setup = receive_bytes(sock)
    try:
        do = pickle.loads(setup)()
    except BaseException as error:
        return sender.send(sender.pack((FAILED, Failure.of(error))))
    del setup
    sender.send(sender.pack((READY,)))
    while True:
        released, job = pickle.loads(receive_bytes(sock))
        sender.reclaim(released)
        # A function, so that no local variable keeps a job in memory while waiting for the next.
        _answer(sender, do, job)


def _answer(sender: Sender, do: Callable[[Any], Any], job: bytes) -> None:
    try:
        message = sender.pack((DONE, do(pickle.loads(job))))
    except BaseException as error:
        message = sender.pack((FAILED, Failure.of(error)))
    sender.send(message)


def _exit_with_parent(sock: socket.socket, parent: int) -> None:
    """Exit if the socket is closed or the parent process has changed.

    The parent check is needed if the parent was killed while its forked children hold its end of
    the socket open.
    """
    closed = select.poll()
    closed.register(sock, 0)  # poll always reports a closed socket
    while not closed.poll(_LOOK_S * 1000) and os.getppid() == parent:
        pass
    time.sleep(GRACE_S)
    os._exit(0)
