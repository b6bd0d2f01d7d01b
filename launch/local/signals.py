"""The signals that ask a training to stop: it finishes the step, saves, and ends with exit code 0.

USR1 and TERM come from schedulers (and from torchrun, which passes TERM on), INT from a terminal.
The handler only records the signal. The training loop shares it in each step's collective, so one
signal to one rank stops all ranks after the same step. `launch.local.worker` installs the handler
before it imports torch: that takes seconds, and without a handler a signal kills the process.
`launch.local.supervise` signals a rank only once it has the handler. While a rank waits for data of
a silent store, USR1 leaves it more time than TERM and INT (`kimi_pretrain.reliability.watchdog`).

A second signal changes nothing, because the save must be completed; but a second INT (Ctrl-C twice)
ends the process at once.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# USR1 is installed last: if it has a handler, all have (`launch.local.supervise` looks at it).
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# An interrupted command gets so long to end by itself. Without a bound, threads that wait for a
# silent store would keep it alive for as long as the store's patience.
LEAVE_S = 4.0
_patient = threading.Event()


def interrupt(number: int, frame: object) -> None:
    """Handle INT or TERM: unwind the stack, and end the process after LEAVE_S in any case.

    It then leaves what a killed process leaves, which every command tolerates.
    """
    code = 128 + number
    threading.Thread(target=_leave, args=(code,), name="interrupted", daemon=True).start()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(code)


def take_time() -> None:
    """Lift the bound of LEAVE_S: the caller ends what it has started in a bounded time itself."""
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
        name: of the signal, such as "SIGUSR1"; None before one came.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    def install(self) -> "StopSignal":
        """Install the handlers, from the main thread; again is harmless. Returns self."""
        for number in STOPPING:
            # A shell starts background jobs with INT ignored, and that must stay so.
            if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                continue
            signal.signal(number, self._note)
            if number != signal.SIGINT:  # a second INT must interrupt system calls
                # Others are restarted, so that libraries do not see an interrupted call.
                signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        return self

    def reason(self) -> str | None:
        """Return why the run is to stop, such as "signal SIGUSR1"; None if it may go on."""
        return self.name and f"signal {self.name}"

    def _note(self, number: int, frame: object) -> None:
        if self.name is None:
            self.name = signal.Signals(number).name
        elif number == signal.SIGINT:
            interrupt(number, frame)


def follow_torchrun() -> None:
    """Have the kernel send this rank TERM when the torchrun that started it is killed.

    Under torchrun only: the signal comes when the thread that started this process ends, and other
    launchers may end that thread early.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def end_in_order() -> None:
    """Let TERM unwind the stack as Ctrl-C does, so that started processes are stopped."""
    signal.signal(signal.SIGTERM, interrupt)
