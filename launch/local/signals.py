"""Signals that ask a training to stop: it finishes the step, saves, and exits with code 0.

USR1 and TERM come from schedulers (and from torchrun, which forwards TERM), INT from a terminal.
The handler only records the signal. The training loop shares it in each step's collective, so one
signal to one rank stops all ranks after the same step. `launch.local.worker` installs the handler
before it imports torch, because the import takes seconds and a signal without a handler kills the
process. `launch.local.supervise` signals a rank only after the rank has installed the handler.
While a rank waits for data from an unresponsive store, USR1 leaves it more time than TERM and INT
(`kimi_pretrain.reliability.watchdog`).

A second signal has no effect, because the save must be completed. The exception is a second INT
(Ctrl-C twice), which ends the process at once.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# USR1 is installed last: if it has a handler, all signals have one (`launch.local.supervise` checks
# this).
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# Seconds in which an interrupted command must end. Without a limit, threads that wait for an
# unresponsive store would keep it alive for the whole of the store's patience.
LEAVE_S = 4.0
_patient = threading.Event()


def interrupt(number: int, frame: object) -> None:
    """Handle INT or TERM: unwind the stack, and end the process after LEAVE_S in any case.

    The process then leaves the same state as a killed process, which every command tolerates.
    """
    code = 128 + number
    threading.Thread(target=_leave, args=(code,), name="interrupted", daemon=True).start()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(code)


def take_time() -> None:
    """Disable LEAVE_S, for a caller that stops its own processes in a bounded time."""
    _patient.set()


def _leave(code: int) -> None:
    time.sleep(LEAVE_S)
    if not _patient.is_set():
        print(
            f"interrupted; ended after {LEAVE_S:g} s without what still waited for an answer, of a "
            "store as a rule: the same command can be given again",
            file=sys.stderr,
            flush=True,
        )
        os._exit(code)


class StopSignal:
    """Records the first signal that asked this process to stop.

    Attributes:
        name: of the signal, such as "SIGUSR1"; None if no signal has arrived.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    def install(self) -> "StopSignal":
        """Install the handlers from the main thread; may be called again. Return self."""
        for number in STOPPING:
            # A shell starts background jobs with INT ignored, which must stay so.
            if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                continue
            signal.signal(number, self._note)
            if number != signal.SIGINT:  # a second INT must interrupt system calls
                # Other signals restart system calls, so that libraries see no interrupted call.
                signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        return self

    def reason(self) -> str | None:
        """Return why the run must stop, such as "signal SIGUSR1"; None if it may continue."""
        return self.name and f"signal {self.name}"

    def _note(self, number: int, frame: object) -> None:
        if self.name is None:
            self.name = signal.Signals(number).name
        elif number == signal.SIGINT:
            interrupt(number, frame)


def follow_torchrun() -> None:
    """Make the kernel send TERM to this rank when the torchrun that started it is killed.

    Applies only under torchrun: the kernel sends the signal when the parent thread ends, and other
    launchers may end that thread early.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def end_in_order() -> None:
    """Make TERM unwind the stack as Ctrl-C does, so that started processes are stopped."""
    signal.signal(signal.SIGTERM, interrupt)
