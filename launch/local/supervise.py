"""Runs torchrun and leaves nothing behind, whatever ends it.

torchrun puts every worker into a session of its own, so a signal to a process group does not reach
them: what is still there at the end is found as descendants and killed.

Of a training (`in_order`) USR1 is passed on to the ranks, and Ctrl-C, TERM and HUP as TERM, past
torchrun, which would kill those that are still saving after a while: they save, end with 0, and
torchrun with them. A rank is told when it has its handler: earlier it would die of it. Where one
cannot save and leaves its last word, torchrun is ended, before it starts all again. A second Ctrl-C
ends everything at once.
"""

import ctypes
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from kimi_pretrain.reliability.exit_report import (
    USER_ERROR,
    ExitReport,
    first_exit_report,
    remove_exit_reports,
)
from kimi_pretrain.reliability.run_files import Appended
from launch.local.signals import PR_SET_PDEATHSIG, take_time

GRACE_SECONDS = 40.0
# Ranks that go on after one has told why it ends: what they wait for will never come.
LINGER_SECONDS = 10.0
POLL_SECONDS = 0.2
# Looking for words, if torchrun is silent: every machine lists the folder of thousands of ranks.
WORD_SECONDS = 1.0
LOOK_SECONDS = 2.0  # looking for processes costs milliseconds
LOG = "torchrun.log"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    run_dir: Path,
    *,
    in_order: bool = False,
    log_name: str = LOG,
) -> tuple[int, str | None]:
    """Run torchrun until it ends, passing its output on.

    Once a rank has left an error in the run folder, what else reaches stderr (torchrun's report,
    the other ranks losing their peer) goes to torchrun's log only: the cause stays visible.

    Args:
        command: from `launch.local.torchrun.command`.
        env: the whole environment of the processes.
        run_dir: the run folder.
        in_order: the ranks take USR1 as a wish to save and end.
        log_name: of torchrun's log in `logs`; of several machines each has its own.

    Returns:
        Exit code, and the line of the rank that failed first, if it left one; then the code is that
        rank's.

    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # No rank of this run has a word yet: the ranks start when all machines have come together.
    remove_exit_reports(run_dir)
    (logs / log_name).write_bytes(b"")
    with _passed_on(in_order) as asked:
        process = _start(command, env)
        assert process.stderr is not None
        relay = _Relay(process.stderr, logs / log_name)
        try:
            code, word = _watch(process, run_dir, asked, relay)
        except BaseException:
            take_time()
            # Whoever interrupts us knows why: torchrun's traceback of it would only be noise.
            relay.hush()
            if in_order:  # the second time: nothing is waited for
                _kill(_family(process.pid))
            raise
        finally:
            stop(process)
            relay.join()
    word = word or _word(run_dir)
    relay.show(word)
    return (code, None) if word is None or not code else (word.code, word.message)


def stop(process: subprocess.Popen) -> None:
    """End a process and all its descendants: by request first, by force after a while."""
    family = _family(process.pid)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _kill(family)


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen:
    """Start torchrun, in a session of its own: Ctrl-C reaches only us, and we end it in order.

    If this process is killed, the kernel kills torchrun, and its ranks save and end
    (`launch.local.signals.follow_torchrun`).
    """
    prctl = ctypes.CDLL(None).prctl
    return subprocess.Popen(
        command,
        env=dict(env),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL)),
    )


class _Asked:
    """Whether a signal wanted the training to end."""

    def __init__(self) -> None:
        self.name: str | None = None

    def note(self, number: int, frame: object) -> None:
        """Take a signal; the second Ctrl-C is not to be waited for."""
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


@contextmanager
def _passed_on(in_order: bool) -> Iterator[_Asked]:
    """Note signals in place of dying of them, where the ranks know what to do."""
    asked = _Asked()
    if not in_order or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {n: signal.getsignal(n) for n in PASSED_ON}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup, or a shell's background job
                signal.signal(number, asked.note)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    process: subprocess.Popen, run_dir: Path, asked: _Asked, relay: "_Relay"
) -> tuple[int, ExitReport | None]:
    """Wait until torchrun ends, and show what it says.

    Returns:
        Its exit code, and the word by which a rank that was told to end could not save; a rank that
        torchrun had just started again may have removed it since.

    """
    told: set[int] = set()
    unsaved: ExitReport | None = None
    word: ExitReport | None = None
    since, doomed = 0.0, list[psutil.Process]()
    known, looked, read = list[psutil.Process](), 0.0, 0.0
    while True:
        try:
            code = process.wait(POLL_SECONDS)
            _end_orphans(known, code)
            return code, unsaved
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() - looked > LOOK_SECONDS:
            known, looked = _ranks(process), time.monotonic()
        ended = asked.name is not None and _ask_to_save(process, told, asked.name)
        if relay.holds or ended or time.monotonic() - read > WORD_SECONDS:
            relay.mark()
            before, word = word, _word(run_dir)
            read = time.monotonic()
            relay.show(word, marked=True)
            if word != before:
                since, doomed = time.monotonic(), _ranks(process)
        if asked.name is not None and word is not None and unsaved is None:
            unsaved = word
            process.terminate()  # so it starts nothing any more
        waited = time.monotonic() - since
        if unsaved is not None:
            if waited > LINGER_SECONDS / 5:  # that other ranks have for their words
                _kill(_ranks(process))
        elif word is None:
            continue
        elif word.code == USER_ERROR and waited > LINGER_SECONDS / 5:
            process.terminate()  # not worth the restarts that torchrun may have left
            _kill(_ranks(process))
        elif waited > LINGER_SECONDS:
            # They are stopped, or in a collective. torchrun would kill them after 30 s.
            _kill(doomed)


def _end_orphans(ranks: Sequence[psutil.Process], code: int) -> None:
    """Wait for the ranks of a torchrun that was killed, which save then, and end what is left."""
    if code < 0:
        psutil.wait_procs(ranks, timeout=GRACE_SECONDS)
    _kill(ranks)


def _ask_to_save(process: subprocess.Popen, told: set[int], name: str) -> bool:
    """Tell the ranks of this machine that have not been told; whether one of those has ended.

    They get USR1 or TERM: how long they wait for a silent store depends on whether a scheduler or
    a person asked.
    """
    number = signal.SIGUSR1 if name == signal.SIGUSR1.name else signal.SIGTERM
    ranks = _ranks(process)
    for rank in ranks:
        if rank.pid not in told and _heeds_signals(rank.pid):
            if not told:
                print(f"{name}: saving, then ending", file=sys.stderr, flush=True)
            told.add(rank.pid)
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
    return not told <= {rank.pid for rank in ranks}


def _heeds_signals(pid: int) -> bool:
    """Whether a process has the handlers of `StopSignal`, of which USR1's is the last."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return False
    _, _, caught = status.partition("SigCgt:")
    if not caught:  # not every sandbox's kernel tells
        return True
    return bool(int(caught.split(maxsplit=1)[0], 16) >> (signal.SIGUSR1 - 1) & 1)


def _ranks(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the ranks that torchrun has started: its children."""
    try:
        return psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(members: Sequence[psutil.Process]) -> None:
    for member in members:
        try:
            if member.is_running():
                member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(members, timeout=5)


def _word(run_dir: Path) -> ExitReport | None:
    """Return the first exit report, as `first_exit_report`."""
    try:
        return first_exit_report(run_dir)
    except OSError:  # a shared folder that does not answer just now is no reason to end a training
        return None


class _Relay:
    """Takes torchrun's stderr: all of it into the log, and to ours what came before a last word.

    Lines are held back until somebody has looked for a word and found none, so that what follows
    the end of a rank does not overtake its word.

    Args:
        lines: to read, in a thread of this object's own.
        log: file to append to.
    """

    def __init__(self, lines: IO[str], log: Path):
        self._log = Appended(log)
        self._held = deque[str]()
        self._marked, self._hushed = 0, False
        self._thread = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._thread.start()

    @property
    def holds(self) -> bool:
        """Whether something waits to be shown."""
        return bool(self._held)

    def mark(self) -> None:
        """Note which lines are there before somebody looks."""
        self._marked = len(self._held)

    def show(self, word: ExitReport | None, *, marked: bool = False) -> None:
        """Let the lines held back go to stderr if there is no word; otherwise drop them.

        Args:
            word: what was found.
            marked: only those that were there at the mark.
        """
        for _ in range(self._marked if marked else len(self._held)):
            line = self._held.popleft()
            if word is None and not self._hushed:
                sys.stderr.write(line)
        self._marked = 0

    def hush(self) -> None:
        """Show nothing from now on that was not there before."""
        self.show(None)
        self._hushed = True

    def join(self) -> None:
        """Wait, but not for long, until all is read."""
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._log.close()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:  # whatever becomes of the log: torchrun waits for who reads it
            self._log.write(line.encode())
            self._held.append(line)
