"""The signals that ask a training to stop: it finishes the step, saves, and ends with exit code 0.

USR1 and TERM come from schedulers (and from torchrun, which passes TERM on), INT from a terminal.
The handler only notes that one came; the loop tells all ranks with what it sends each step, so one
signal to one rank stops them all after the same step. `launch.local.worker` installs it before
torch is imported: importing takes seconds, and until there is a handler a signal kills the process.
`launch.local.supervise` tells a rank as soon as it has the handler. Where data is waited for and
the store is silent, USR1 is given more time than what a person sends
(`kimi_pretrain.reliability.watchdog`).

A second signal changes nothing, because the save must come to its end; but a second INT (Ctrl-C
twice) ends the process at once.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# USR1 comes last: who sees that it has a handler knows that all have.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


# A command that was interrupted may take so long to end by itself: threads that wait for a store
# which does not answer would hold it up for as long as the store's patience lasts.
LEAVE_S = 4.0
_patient = threading.Event()


def interrupt(number: int, frame: object) -> None:
    """Handle Ctrl-C, and TERM where it is to unwind the stack: do so, and end after LEAVE_S anyway.

    What is left then is what a killed process leaves, and every command can bear that.
    """
    code = 128 + number
    threading.Thread(target=_leave, args=(code,), name="interrupted", daemon=True).start()
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(code)


def take_time() -> None:
    """Let an interrupted command end what it has started, in a time that is bounded by itself."""
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
    """Notes the first signal that asked this process to stop.

    Attributes:
        name: of the signal, such as "SIGUSR1"; None as long as none came.
        since: when it came, in seconds of the wall clock.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.since: float | None = None

    def install(self) -> "StopSignal":
        """Take the signals over from now on; only the main thread may call this. Once is enough."""
        for number in STOPPING:
            # A shell starts background jobs with Ctrl-C ignored; that is not ours to change.
            if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                continue
            signal.signal(number, self._note)
            if number != signal.SIGINT:  # the second of those must get through
                # System calls of libraries go on as if nothing had happened.
                signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        return self

    def reason(self) -> str | None:
        """Return why the run is to stop, in words; None if it may go on."""
        return self.name and f"signal {self.name}"

    def _note(self, number: int, frame: object) -> None:
        if self.name is None:
            self.name, self.since = signal.Signals(number).name, time.time()
        elif number == signal.SIGINT:
            interrupt(number, frame)


def follow_torchrun() -> None:
    """Have a rank told to stop, by TERM, when the torchrun that started it is killed.

    Only there: the kernel sends the signal when the thread ends that started this process, and of
    other launchers nobody knows how long that lives.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def end_in_order() -> None:
    """Let SIGTERM unwind the stack like Ctrl-C does, so that what was started is stopped."""
    signal.signal(signal.SIGTERM, interrupt)
