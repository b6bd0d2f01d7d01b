"""Runs torchrun, forwards signals to its ranks, and leaves no process running.

torchrun starts every worker in its own session, so a signal to a process group does not reach it.
Remaining processes are found at the end as descendants and killed.

Signals of a training (`in_order`) go directly to the ranks: USR1 as USR1; INT, TERM and HUP as
TERM. If they went to torchrun, it would kill ranks that are still saving after a while. The ranks
save and exit with code 0, and torchrun ends with them. A rank gets the signal only after it has
installed the handler; an earlier signal would kill it. If a rank cannot save and leaves an exit
report, torchrun is stopped before it restarts the ranks. A second Ctrl-C kills all processes at
once.

Until rank 0 holds the run folder, another run may be using it: nothing is written, and only reports
of this start count (`kimi_pretrain.reliability.start_identity`).
"""

import ctypes
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import psutil

from kimi_pretrain.reliability.exit_report import (
    USER_ERROR,
    ExitReport,
    first_exit_report,
    report_files,
)
from kimi_pretrain.reliability.run_files import KEPT_BYTES, Appended
from kimi_pretrain.reliability.start_identity import REPORTS, START, holds, joined_start
from kimi_pretrain.reliability.status import mark_failed
from launch.local.signals import PR_SET_PDEATHSIG, take_time

GRACE_SECONDS = 40.0
# Maximum time that ranks may run after one of them has left an exit report; they wait for it in
# vain.
LINGER_SECONDS = 10.0
POLL_SECONDS = 0.2
# Interval of checks for exit reports while torchrun is silent: each machine lists thousands of
# files.
REPORT_SECONDS = 1.0
LOOK_SECONDS = 2.0  # interval of listing processes, which costs milliseconds
LOG = "torchrun.log"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class _Start:
    """A start as seen by its supervisor: the run folder, and this start's files in it.

    Attributes:
        private: report folder of ranks whose start does not hold the run folder.
        name: of the start, as in the ranks' environment.
        known: reports of earlier starts.
    """

    run_dir: Path
    private: Path
    name: str
    known: frozenset[tuple[int, int]]

    @property
    def joined(self) -> str:
        """Name of the start that the ranks have joined."""
        return joined_start(self.private) or self.name

    def holds_folder(self) -> bool:
        """Return True if this start holds the run folder, or was the last that did."""
        return holds(self.run_dir, self.joined)

    def report(self) -> ExitReport | None:
        """Return the exit report of the rank that failed first."""
        own = first_exit_report(self.private)
        try:
            shared = first_exit_report(self.run_dir, start=self.joined, known=self.known)
        except OSError:  # an unresponsive shared folder is no reason to stop a training
            return own
        return own or shared


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    run_dir: Path,
    *,
    in_order: bool = False,
    log_name: str = LOG,
) -> tuple[int, str | None]:
    """Run torchrun until it ends, and forward its output.

    After a rank has left an exit report, further lines on stderr (torchrun's report, other ranks
    that lose their peer) go only to torchrun's log, so that the cause stays visible.

    Args:
        command: from `launch.local.torchrun.command`.
        env: the whole environment of the processes; may name the start.
        run_dir: the run folder.
        in_order: True if the ranks save and end on USR1 or TERM.
        log_name: of torchrun's log in `logs`; each of several machines has its own.

    Returns:
        Exit code, and the message of the rank that failed first, if it left a report. The code is
        then that rank's, and status.json records the message, too.
    """
    with TemporaryDirectory(prefix="kimi-pretrain-reports-") as private:  # mode 0700
        try:
            known = frozenset(report_files(run_dir).values())
        except OSError:
            known = frozenset[tuple[int, int]]()
        start = _Start(run_dir, Path(private), env.get(START) or secrets.token_hex(8), known)
        own = {**env, START: start.name, REPORTS: private}
        code, report = _supervised(command, own, start, in_order, run_dir / "logs" / log_name)
        if report is None or not code:
            return code, None
        if start.holds_folder():
            mark_failed(run_dir, report.message)
    return report.code, report.message


def _supervised(
    command: Sequence[str], env: Mapping[str, str], start: _Start, in_order: bool, log: Path
) -> tuple[int, ExitReport | None]:
    """Return torchrun's exit code, and the decisive exit report."""
    with _passed_on(in_order) as asked:
        process = _start(command, env)
        assert process.stderr is not None
        relay = _Relay(process.stderr, log)
        try:
            code, report = _watch(process, start, asked, relay)
        except BaseException:
            take_time()
            # The interruption is known, so torchrun's traceback of it is noise.
            relay.hush()
            if in_order:  # second Ctrl-C: do not wait
                _kill(_family(process.pid))
            raise
        finally:
            stop(process)
            if start.holds_folder():
                relay.keep()
            relay.join()
    report = report or start.report()
    relay.show(report)
    return code, report


def stop(process: subprocess.Popen) -> None:
    """End a process and all its descendants with TERM, and with KILL after `GRACE_SECONDS`."""
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
    """Start torchrun in its own session, so that Ctrl-C reaches only this process.

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
    """First signal that asked the training to stop; `since` is its time on the monotonic clock."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.since = 0.0

    def note(self, number: int, frame: object) -> None:
        """Record a signal; a second INT interrupts at once."""
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.name is None:
            self.since = time.monotonic()
        self.name = signal.Signals(number).name


@contextmanager
def _passed_on(in_order: bool) -> Iterator[_Asked]:
    """Record signals instead of dying from them, if the ranks stop in order."""
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
    process: subprocess.Popen, start: _Start, asked: _Asked, relay: "_Relay"
) -> tuple[int, ExitReport | None]:
    """Wait until torchrun ends, and show its output.

    Returns:
        Its exit code, and the exit report of a rank that was asked to stop and could not save. The
        report is kept, because a rank that torchrun has restarted may have removed the file.
    """
    signalled: set[int] = set()
    unsaved: ExitReport | None = None
    report: ExitReport | None = None
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
        ended = asked.name is not None and _ask_to_save(process, signalled, asked.name)
        if relay.holds or ended or time.monotonic() - read > REPORT_SECONDS:
            relay.mark()
            read = time.monotonic()
            before, report = report, start.report()
            relay.show(report, marked=True)
            if not relay.kept and start.holds_folder():
                relay.keep()
            if report != before:
                since, doomed = time.monotonic(), _ranks(process)
        # An earlier report may come from ranks that torchrun has replaced since.
        current = report if read > asked.since else None
        if asked.name is not None and current is not None and unsaved is None:
            unsaved = current
            process.terminate()  # so that it does not restart ranks
        waited = time.monotonic() - since
        if unsaved is not None:
            if waited > LINGER_SECONDS / 5:  # time for the other ranks' reports
                _kill(_ranks(process))
        elif report is None:
            continue
        elif report.code == USER_ERROR and waited > LINGER_SECONDS / 5:
            process.terminate()  # a restart would fail again
            _kill(_ranks(process))
        elif waited > LINGER_SECONDS:
            # They hang in a collective, or are stopped. torchrun would kill them after 30 s.
            _kill(doomed)


def _end_orphans(ranks: Sequence[psutil.Process], code: int) -> None:
    """Wait for the ranks to save if torchrun was killed; then kill any that remain."""
    if code < 0:
        psutil.wait_procs(ranks, timeout=GRACE_SECONDS)
    _kill(ranks)


def _ask_to_save(process: subprocess.Popen, signalled: set[int], name: str) -> bool:
    """Signal the ranks of this machine that were not signalled yet; return True if one has ended.

    They get USR1 or TERM, because they wait longer for an unresponsive store after a scheduler's
    signal.
    """
    number = signal.SIGUSR1 if name == signal.SIGUSR1.name else signal.SIGTERM
    ranks = _ranks(process)
    for rank in ranks:
        if rank.pid not in signalled and _heeds_signals(rank.pid):
            if not signalled:
                print(f"{name}: saving, then ending", file=sys.stderr, flush=True)
            signalled.add(rank.pid)
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
    return not signalled <= {rank.pid for rank in ranks}


def _heeds_signals(pid: int) -> bool:
    """Return True if a process has all handlers of `StopSignal`; USR1's is installed last."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return False
    _, _, caught = status.partition("SigCgt:")
    if not caught:  # some sandboxed kernels omit it
        return True
    return bool(int(caught.split(maxsplit=1)[0], 16) >> (signal.SIGUSR1 - 1) & 1)


def _ranks(process: subprocess.Popen) -> list[psutil.Process]:
    """Return torchrun's children, which are the ranks."""
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


class _Relay:
    """Copies torchrun's stderr to the log, and to our stderr until an exit report appears.

    Lines are held back until a check has found no exit report, so that the consequences of a rank's
    end are not shown before its report.

    Args:
        lines: torchrun's stderr, read in a separate thread.
        log: file for all lines, once `keep` is called; until then they are kept in memory.
    """

    def __init__(self, lines: IO[str], log: Path):
        self._file, self._log, self._early = log, None, b""
        self._writing = threading.Lock()
        self._held = deque[str]()
        self._marked, self._hushed = 0, False
        self._thread = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._thread.start()

    @property
    def kept(self) -> bool:
        """True if lines go to the log."""
        return self._log is not None

    def keep(self) -> None:
        """Start a new log with the lines from memory; this start now holds the run folder."""
        with self._writing, suppress(OSError):
            if self._log is None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._log = Appended(self._file)
                self._file.write_bytes(b"")
                self._log.write(self._early)
                self._early = b""

    @property
    def holds(self) -> bool:
        """True if lines are held back."""
        return bool(self._held)

    def mark(self) -> None:
        """Mark the lines held back now, before a check for reports."""
        self._marked = len(self._held)

    def show(self, report: ExitReport | None, *, marked: bool = False) -> None:
        """Write the lines held back to stderr if there is no report; otherwise drop them.

        Args:
            report: result of the check.
            marked: only the lines held back at the mark.
        """
        for _ in range(self._marked if marked else len(self._held)):
            line = self._held.popleft()
            if report is None and not self._hushed:
                sys.stderr.write(line)
        self._marked = 0

    def hush(self) -> None:
        """Show the lines held back, but no later lines."""
        self.show(None)
        self._hushed = True

    def join(self) -> None:
        """Wait at most 5 s until everything is read."""
        self._thread.join(timeout=5)
        if self._log is not None and not self._thread.is_alive():
            self._log.close()

    def _read(self, lines: IO[str]) -> None:
        # read on even if the log cannot be written: torchrun blocks on a full pipe
        for line in lines:
            with self._writing:
                if self._log is not None:
                    self._log.write(line.encode())
                elif len(self._early) < KEPT_BYTES:
                    self._early += line.encode()
            self._held.append(line)
