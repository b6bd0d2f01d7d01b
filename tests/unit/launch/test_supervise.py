"""Tests of the supervisor with stand-ins for torchrun: output, errors, no process left over."""

import errno
import io
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kimi_pretrain.reliability.exit_report import ExitReport, remove_exit_reports
from kimi_pretrain.reliability.start_identity import START
from launch.local import supervise, torchrun
from tests import ROOT
from tests.held_folder import hold


@pytest.fixture
def held(tmp_path):
    """Return the environment of a start whose rank 0 holds the run folder's lock."""
    hold(tmp_path, "this")
    return {**os.environ, START: "this"}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_passes_the_exit_code_and_the_output_on(tmp_path, capfd, held):
    code = "import sys; print('out'); print('noted', file=sys.stderr); sys.exit(7)"
    assert supervise.run(python(code), held, tmp_path) == (7, None)
    assert capfd.readouterr().out == "out\n"
    assert (tmp_path / "logs" / "torchrun.log").read_text() == "noted\n"


def test_shows_the_first_error_and_hides_what_follows(tmp_path, capsys, monkeypatch, held):
    code = """
import pathlib, sys, time
logs = pathlib.Path(sys.argv[1]) / "logs"
print("a warning", file=sys.stderr, flush=True)
while not (logs / "shown").exists():
    time.sleep(0.01)
(logs / "error_rank_2.txt").write_text("no bucket\\nexit code 2, start this\\n")
time.sleep(0.05)
(logs / "error_rank_0.txt").write_text("lost rank 2\\nexit code 1, start this\\n")
print("Traceback of torchrun", file=sys.stderr, flush=True)
sys.exit(1)
"""
    stale = tmp_path / "logs" / "error_rank_1.txt"
    stale.parent.mkdir()
    stale.write_text("of an earlier run\nexit code 1, start this\n")
    show = supervise._Relay.show

    def shown(relay, report, *, marked=False):
        some = marked and relay._marked > 0
        show(relay, report, marked=marked)
        if some:
            (tmp_path / "logs" / "shown").touch()

    monkeypatch.setattr(supervise._Relay, "show", shown)
    result = supervise.run([*python(code), str(tmp_path)], held, tmp_path)
    assert result == (2, "no bucket")  # the first failed rank's code; torchrun hides it
    assert capsys.readouterr().err == "a warning\n"
    assert "Traceback of torchrun" in (tmp_path / "logs" / "torchrun.log").read_text()


def test_words_of_an_earlier_run_may_vanish_while_they_are_removed(tmp_path, monkeypatch):
    """Machines that share a run folder remove the reports at the same time."""
    logs = tmp_path / "logs"
    logs.mkdir()
    left = [logs / f"error_rank_{rank}.txt" for rank in range(3)]
    real = Path.glob

    def glob(folder: Path, pattern: str):
        found = list(real(folder, pattern))
        for file in found[:2]:  # another machine removes them first
            file.unlink()
        return iter(found)

    for file in left:
        file.write_text("of an earlier run\nexit code 2\n")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", glob)
        remove_exit_reports(tmp_path)
    assert not list(logs.iterdir())


def test_each_of_several_machines_has_its_own_log(tmp_path, held):
    code = "import sys; print('noted', file=sys.stderr)"
    name = torchrun.log_name(torchrun.Nodes(8, 2, "host:1"))
    assert name == f"torchrun_{socket.gethostname()}.log"
    assert torchrun.log_name(torchrun.Nodes(8)) == "torchrun.log"
    assert supervise.run(python(code), held, tmp_path, log_name=name) == (0, None)
    assert [file.name for file in (tmp_path / "logs").iterdir()] == [name]
    assert (tmp_path / "logs" / name).read_text() == "noted\n"


def test_a_folder_that_does_not_answer_ends_no_training(tmp_path, monkeypatch, held):
    def first_exit_report(base, **more):
        if more:
            raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(supervise, "first_exit_report", first_exit_report)
    code = "import sys, time; print('noted', file=sys.stderr); time.sleep(1); sys.exit(3)"
    assert supervise.run(python(code), held, tmp_path) == (3, None)


def test_a_log_on_a_full_disk_keeps_nobody_waiting(tmp_path, capsys, held):
    """The output exceeds a pipe's buffer, so that an unread pipe would block torchrun."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "torchrun.log").symlink_to("/dev/full")
    code = "import sys\nfor line in range(50000): print(line, file=sys.stderr)"
    assert supervise.run(python(code), held, tmp_path) == (0, None)
    told = capsys.readouterr().err.splitlines()
    assert told == [str(line) for line in range(50000)]


def test_many_lines_are_shown_at_once_in_their_order(tmp_path, capsys, monkeypatch, held):
    looked = []
    monkeypatch.setattr(supervise, "first_exit_report", lambda base, **more: looked.append(base))
    code = "import sys\nfor line in range(5000): print(line, file=sys.stderr)"
    assert supervise.run(python(code), held, tmp_path) == (0, None)
    assert capsys.readouterr().err.split() == [str(line) for line in range(5000)]
    assert len(looked) < 1000  # not once per line


def test_lines_wait_until_somebody_has_looked_for_a_word(tmp_path, capsys):
    log = tmp_path / "torchrun.log"
    relay = supervise._Relay(io.StringIO("first\nsecond\n"), log)
    relay.keep()
    relay.join()
    assert (log.read_text(), relay.holds) == ("first\nsecond\n", True)
    assert capsys.readouterr().err == ""
    relay.mark()
    relay._held.append("while looking\n")
    relay.show(None, marked=True)
    assert capsys.readouterr().err == "first\nsecond\n"
    relay.mark()
    relay._held.append("after the word\n")
    relay.show(ExitReport("no bucket"), marked=True)
    relay.show(ExitReport("no bucket"))
    assert (capsys.readouterr().err, relay.holds) == ("", False)
    relay._held.append("before the interruption\n")
    relay.hush()
    relay._held.append("after it\n")
    relay.show(None)
    assert capsys.readouterr().err == "before the interruption\n"


def test_a_worker_in_a_session_of_its_own_does_not_survive(tmp_path, monkeypatch, held):
    """torchrun starts workers in new sessions and cannot clean up when it is killed by SIGKILL."""
    code = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"],
                         start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(120)
"""
    monkeypatch.setattr(supervise, "GRACE_SECONDS", 0.3)
    pid_file = tmp_path / "pid"

    class Interrupted(BaseException):
        pass

    def interrupt(process):
        end = time.monotonic() + 50
        while not (pid_file.is_file() and pid_file.read_text()):
            assert time.monotonic() < end
            time.sleep(0.02)
        raise Interrupted

    real = supervise.subprocess.Popen

    class Popen(real):
        def wait(self, timeout=None):
            if self.poll() is None and not getattr(self, "hit", False):
                self.hit = True
                interrupt(self)
            return super().wait(timeout)

    monkeypatch.setattr(supervise.subprocess, "Popen", Popen)
    with pytest.raises(Interrupted):
        supervise.run([*python(code), str(pid_file)], held, tmp_path)
    worker = int(pid_file.read_text())
    with suppress(psutil.NoSuchProcess):  # reaped, or still a zombie
        assert psutil.Process(worker).status() == "zombie"


# Stand-in for torchrun: starts one rank in a new session and exits with the rank's code.
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[2], *sys.argv[1:2]], start_new_session=True)
sys.exit(abs(rank.wait()))
"""
# Installs its handler late, like a rank that loads torch; the supervisor must hold signals back.
RANK = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "begun").touch()
time.sleep(0.5)
sys.path.insert(0, ROOT)
from launch.local.signals import StopSignal
stop = StopSignal().install()
while stop.name is None:
    time.sleep(0.01)
(folder / "saved").write_text(stop.name)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_training_is_asked_to_save_and_then_waited_for(number, tmp_path, capfd, held):
    def interrupt() -> None:
        end = time.monotonic() + 60
        while not (tmp_path / "begun").is_file() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    rank = f"ROOT = {str(ROOT)!r}{RANK}"
    sender = threading.Thread(target=interrupt)
    sender.start()
    command = [*python(LAUNCHER), str(tmp_path), rank]
    assert supervise.run(command, held, tmp_path, in_order=True) == (0, None)
    sender.join()
    # The signal decides how long a rank waits for a silent store.
    wanted = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
    assert (tmp_path / "saved").read_text() == wanted.name
    assert f"{number.name}: saving, then ending" in capfd.readouterr().err
    assert signal.getsignal(number) == before


def test_a_report_from_before_a_restart_is_not_that_of_a_rank_that_saves(
    tmp_path, monkeypatch, held
):
    """The supervisor read the report before it asked the rank to save; the file is gone now."""
    reports = [ExitReport("no progress for 30 s", 75)]
    monkeypatch.setattr(
        supervise._Start, "report", lambda start: reports.pop() if reports else None
    )
    monkeypatch.setattr(supervise, "REPORT_SECONDS", 60.0)

    def interrupt() -> None:
        end = time.monotonic() + 60
        while (reports or not (tmp_path / "begun").is_file()) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=interrupt)
    sender.start()
    command = [*python(LAUNCHER), str(tmp_path), f"ROOT = {str(ROOT)!r}{RANK}"]
    assert supervise.run(command, held, tmp_path, in_order=True) == (0, None)
    sender.join()
    assert (tmp_path / "saved").read_text() == "SIGTERM"


# Stand-in for torchrun with restarts: restarts its rank forever and ends on SIGTERM.
RESTARTS = """
import signal, subprocess, sys
rank = None
def end(number, frame):
    rank.kill()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
while True:
    command = [sys.executable, "-c", sys.argv[2], *sys.argv[1:2]]
    rank = subprocess.Popen(command, start_new_session=True)
    rank.wait()
"""
# A rank that cannot save on a stop signal; like every rank, it first removes its old report.
CANNOT_SAVE = """
import pathlib, sys, time
sys.path.insert(0, ROOT)
from kimi_pretrain.reliability.exit_report import (
    ExitReport, remove_private_report, write_exit_report,
)
from launch.local.signals import StopSignal
stop = StopSignal().install()
run_dir = pathlib.Path(sys.argv[1])
time.sleep(1.0)  # a real one starts slower
remove_private_report(0)
(run_dir / "begun").touch()
while stop.name is None:
    time.sleep(0.01)
write_exit_report(run_dir, 0, ExitReport("the store is silent", 75))
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_that_cannot_save_is_not_tried_again(number, tmp_path, held):
    """A run that was asked to stop is not restarted; the test would hang if it were."""

    def interrupt() -> None:
        end = time.monotonic() + 60
        while not (tmp_path / "begun").is_file() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=interrupt)
    sender.start()
    command = [*python(RESTARTS), str(tmp_path), f"ROOT = {str(ROOT)!r}{CANNOT_SAVE}"]
    result = supervise.run(command, held, tmp_path, in_order=True)
    sender.join()
    assert result == (75, "the store is silent")


def test_a_rank_that_lingers_after_the_error_of_another_is_killed(tmp_path, monkeypatch, held):
    """The rank may be suspended or inside a collective; torchrun would wait for half a minute."""
    monkeypatch.setattr(supervise, "LINGER_SECONDS", 0.5)
    (tmp_path / "logs").mkdir()
    report = "of an earlier start\nexit code 2, start this\n"  # as from the same machines
    (tmp_path / "logs" / "error_rank_1.txt").write_text(report)

    def rank() -> str:
        return (
            "import pathlib, sys, time\n"
            "logs = pathlib.Path(sys.argv[1]) / 'logs'\n"
            "(logs / 'error_rank_3.txt').write_text('no progress\\nexit code 75, start this\\n')\n"
            "time.sleep(100)"
        )

    command = [*python(LAUNCHER), str(tmp_path), rank()]
    start = time.monotonic()
    assert supervise.run(command, held, tmp_path, in_order=True) == (75, "no progress")
    assert time.monotonic() - start < 50


def test_what_the_user_has_to_mend_is_not_tried_again(tmp_path, monkeypatch, capsys, held):
    """A user error ends a launcher that would otherwise restart forever."""
    monkeypatch.setattr(supervise, "LINGER_SECONDS", 0.5)
    code = """
import pathlib, sys, time
logs = pathlib.Path(sys.argv[1]) / "logs"
logs.mkdir(exist_ok=True)
while True:
    (logs / "error_rank_0.txt").write_text("no such source\\nexit code 2, start this\\n")
    print("what follows from it", file=sys.stderr, flush=True)
    time.sleep(0.05)
"""
    result = supervise.run([*python(code), str(tmp_path)], held, tmp_path, in_order=True)
    assert result == (2, "no such source")
    assert capsys.readouterr().err == ""


# Stand-in for torchrun whose ranks another run's lock refuses: they report the error and exit.
REFUSED = """
import sys
from pathlib import Path
sys.path.insert(0, ROOT)
from kimi_pretrain.reliability.exit_report import ExitReport, write_exit_report
run_dir = Path(sys.argv[1])
for rank in (0, 1):
    write_exit_report(run_dir, rank, ExitReport(f"{run_dir} is in use by another run", 2))
print("Traceback of torchrun", file=sys.stderr)
sys.exit(1)
"""


def test_a_start_without_the_lock_writes_nothing_into_the_folder(tmp_path, capsys):
    """The supervisor of the run in that folder would mistake the report for its own."""
    (tmp_path / "logs").mkdir()
    for name in ("error_rank_0.txt", "torchrun.log"):  # files of the other run
        (tmp_path / "logs" / name).write_text("of the first\nexit code 1, start first\n")
    hold(tmp_path, "first")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    command = [*python(f"ROOT = {str(ROOT)!r}{REFUSED}"), str(tmp_path)]
    result = supervise.run(command, os.environ, tmp_path, in_order=True)
    assert result == (2, f"{tmp_path} is in use by another run")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("others", ["report", "stacks"])
def test_a_report_of_another_start_ends_no_run(tmp_path, held, others):
    """On a mount without locks, a second start may write reports into the folder."""
    code = f"""
import pathlib, sys, time
logs = pathlib.Path(sys.argv[1]) / "logs"
logs.mkdir(exist_ok=True)
if {others!r} == "report":
    (logs / "error_rank_0.txt").write_text("in use\\nexit code 2, start other\\n")
else:
    (logs / "held_rank_0.txt").write_text("start other\\nstacks")
time.sleep(1.0)
sys.exit(3)
"""
    assert supervise.run([*python(code), str(tmp_path)], held, tmp_path) == (3, None)


def test_the_ranks_tell_their_supervisor_which_start_they_joined(tmp_path):
    """The machine of rank 0 may name the rendezvous differently, so ranks report their start."""
    hold(tmp_path, "of_rank_0")
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from kimi_pretrain.reliability.exit_report import ExitReport, write_exit_report
from kimi_pretrain.reliability.start_identity import join_start
join_start("of_rank_0")
write_exit_report(Path(sys.argv[1]), 3, ExitReport("no progress", 75))
sys.exit(1)
"""
    assert supervise.run([*python(code), str(tmp_path)], os.environ, tmp_path) == (
        75,
        "no progress",
    )
    word = (tmp_path / "logs" / "error_rank_3.txt").read_text()
    assert word == "no progress\nexit code 75, start of_rank_0\n"
