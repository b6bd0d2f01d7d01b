"""Workers and parents that die, and interrupts: results stay right and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from data_pipeline.workers.worker_main import LEFT_TO_PARENT
from data_pipeline.workers.workers import WorkerDied, Workers
from tests import ROOT
from tests.worker_jobs import calls, die, hang

pytestmark = pytest.mark.fault
PLENTY = {"max_bytes": 1 << 40, "max_jobs": 4}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def children(of: int | None = None) -> set[int]:
    """Return the children of all threads of a process, found by parent: threads can vanish."""
    return {child.pid for child in psutil.Process(of).children()}


def wait_until(condition, seconds=50.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["kill", "crash", "exit", "orphan"])
def test_a_job_whose_worker_dies_is_done_by_another(how, tmp_path, capfd):
    jobs = [(partial(np.full, 30_000, i), 1) for i in range(9)]
    jobs[4] = (partial(die, how, tmp_path, 1), 1)
    begin = time.monotonic()
    with Workers(calls, 2, timeout_s=30) as workers:
        got = list(workers.run(jobs, **PLENTY))
    assert len(list(tmp_path.iterdir())) == 2, "the job was tried twice"
    assert time.monotonic() - begin < 50  # the orphan, if there is one, lives longer
    orphans = [mark.read_text() for mark in tmp_path.iterdir() if mark.stat().st_size]
    assert len(orphans) == (how == "orphan")
    for orphan in orphans:
        os.kill(int(orphan), signal.SIGKILL)
    assert got.pop(4) == "alive"
    assert [int(array[-1]) for array in got] == [0, 1, 2, 3, 5, 6, 7, 8]
    # Only a crash reports its location; an external kill prints nothing.
    assert ("Segmentation fault" in capfd.readouterr().err) == (how == "crash")


@pytest.mark.parametrize(
    ("how", "ending"),
    [("kill", r"was ended by signal 9 \(SIGKILL, as when .*"), ("exit", "ended with exit code 5")],
)
def test_a_job_that_costs_two_workers_is_named(how, ending, tmp_path):
    jobs = [(partial(int, 7), 1), (partial(die, how, tmp_path, 9), 1), (partial(int, 8), 1)]
    with Workers(calls, 1, timeout_s=20) as workers:
        run = workers.run(jobs, **PLENTY)
        assert next(run) == 7
        message = rf"job 1 \(.*die.*\) cost 2 workers in a row: worker 0 \(process \d+\) {ending}; "
        with pytest.raises(WorkerDied, match=message):
            next(run)
        assert len(list(tmp_path.iterdir())) == 2
        assert list(workers.run([(partial(int, 9), 1)], **PLENTY)) == [9]


def test_a_worker_that_dies_between_jobs_costs_nothing(tmp_path):
    with Workers(calls, 1, timeout_s=20) as workers:
        (pid,) = workers.run([(os.getpid, 1)], **PLENTY)
        os.kill(pid, signal.SIGKILL)
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        wait_until(lambda: os.waitid(os.P_PID, pid, look))
        # The job may cost another worker, because the first worker died without a job.
        assert list(workers.run([(partial(die, "kill", tmp_path, 1), 1)], **PLENTY)) == ["alive"]


def test_results_outlive_their_worker():
    with Workers(calls, 1, timeout_s=20) as workers:
        pid, array = workers.run([(os.getpid, 1), (partial(np.arange, 50_000), 1)], **PLENTY)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
        more = next(workers.run([(partial(np.ones, 50_000), 1)], **PLENTY))
    assert array.sum() == 50_000 * 49_999 // 2
    assert more.sum() == 50_000


@pytest.mark.parametrize("send", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signals_are_left_to_the_parent(send):
    with Workers(calls, 1, timeout_s=20) as workers:
        (pid,) = workers.run([(os.getpid, 1)], **PLENTY)
        os.kill(pid, send)
        assert list(workers.run([(os.getpid, 1)], **PLENTY)) == [pid]


def masks(pid: int) -> tuple[int, int]:
    """Return the signals blocked and ignored by a process, as bit masks."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["SigBlk"], 16), int(fields["SigIgn"], 16)


def test_no_signal_finds_a_worker_half_started():
    wanted = sum(1 << number - 1 for number in LEFT_TO_PARENT)
    before = children()
    new: set[int] = set()
    seen = []
    with Workers(calls, 1):
        wait_until(lambda: new.update(children() - before) or new)
        (pid,) = new
        wait_until(lambda: seen.append(masks(pid)) or seen[-1][1] & wanted == wanted)
    assert all((blocked | ignored) & wanted == wanted for blocked, ignored in seen)


def test_a_stopped_worker_is_replaced_after_the_timeout(tmp_path):
    with Workers(calls, 1, timeout_s=50) as workers:
        (pid,) = workers.run([(os.getpid, 1)], **PLENTY)
        os.kill(pid, signal.SIGSTOP)
        workers._timeout_s = 3.0  # too short for the start of a worker on a loaded machine
        with pytest.raises(TimeoutError, match="worker 0 is still at it"):
            next(workers.run([(partial(int, 3), 1)], **PLENTY))
        wait_until(lambda: not is_alive(pid))
        workers._timeout_s = 50.0
        assert list(workers.run([(partial(int, 3), 1)], **PLENTY)) == [3]


@pytest.mark.parametrize("ahead", [1, 4])
def test_closing_in_the_middle_ends_everything_soon(ahead, tmp_path):
    others = children()  # servers of other tests
    workers = Workers(calls, 2, timeout_s=60)
    workers.run([(partial(hang, tmp_path), 1)] * 4, max_bytes=99, max_jobs=ahead)
    wait_until(lambda: len(list(tmp_path.iterdir())) == min(ahead, 2))
    pids = children() - others
    assert len(pids) >= 2
    begin = time.monotonic()
    workers.close()
    assert time.monotonic() - begin < 50  # a job takes 60 s
    left = pids & children()  # would include zombies
    assert not left


SCRIPT = """
import os, sys, time
from functools import partial
from pathlib import Path
from data_pipeline.workers.worker_main import LEFT_TO_PARENT
from data_pipeline.workers.workers import Workers
from tests.worker_jobs import calls, hang
marks = Path(sys.argv[1])
def say(what):
    print(what, flush=True)
jobs = [(partial(hang, marks), 1)] * 4
"""


def script(tmp_path: Path, body: str, *flags: str) -> subprocess.Popen[str]:
    """Start a script in a new process group; its workers leave marks in a folder."""
    marks = tmp_path / "marks"
    marks.mkdir()
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + body)
    return subprocess.Popen(
        [sys.executable, *flags, str(file), str(marks)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def marks_in(tmp_path: Path) -> list[int]:
    return sorted(int(mark.name) for mark in (tmp_path / "marks").iterdir())


def test_a_script_needs_no_guard_and_no_close(tmp_path):
    body = """
workers = Workers(calls, 2)
total = sum(workers.run([(partial(int, i), 1) for i in range(9)], max_bytes=9, max_jobs=4))
say(total)
"""
    with script(tmp_path, body, "-X", "dev") as running:
        out, err = running.communicate(timeout=100)
    assert (running.returncode, out, err) == (0, "36\n", "")
    assert group_is_gone(running.pid)


def test_what_the_main_script_defines_is_refused(tmp_path):
    body = """
class Job:
    pass
def setup():
    return len
for make in (lambda: Workers(setup, 1), lambda: list(
    Workers(calls, 1).run([(Job(), 1)], max_bytes=9, max_jobs=4))):
    try:
        make()
    except ValueError as error:
        say(error)
"""
    with script(tmp_path, body) as running:
        out, err = running.communicate(timeout=100)
    assert (running.returncode, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith("setup refers to 'setup' of the main script, which workers do not imp")
    assert second.startswith("job 0 (<__main__.Job object")
    assert "refers to 'Job' of the main script" in second


HANDLES = """
try:
    with Workers(calls, 2) as workers:
        say("started")
        next(workers.run(jobs, max_bytes=9, max_jobs=4))
except KeyboardInterrupt:
    say("interrupted")
    sys.exit(3)
"""
HANDLES_NOTHING = """
workers = Workers(calls, 2)
say("started")
next(workers.run(jobs, max_bytes=9, max_jobs=4))
"""


@pytest.mark.parametrize("moment", ["starting", "working"])
@pytest.mark.parametrize("body", [HANDLES, HANDLES_NOTHING], ids=["caught", "uncaught"])
def test_an_interrupt_ends_all_and_prints_nothing_of_workers(tmp_path, body, moment):
    with script(tmp_path, body) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "started\n"
        if moment == "working":
            wait_until(lambda: len(marks_in(tmp_path)) == 2)
        begin = time.monotonic()
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=100)
    assert time.monotonic() - begin < 50  # a job takes 60 s
    if body == HANDLES:
        assert (running.returncode, out, err) == (3, "interrupted\n", "")
    else:
        assert running.returncode == -signal.SIGINT
        assert err.count("Traceback (most recent call last)") == 1
        assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert group_is_gone(running.pid)


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    shared = set(os.listdir("/dev/shm"))
    body = """
workers = Workers(calls, 3)
big = [(partial(bytes, 1 << 22), 1)] * 3
kept = list(workers.run(big, max_bytes=9, max_jobs=4))
jobs[2] = (os.getpid, 1)  # one of them is idle
say("started")
list(workers.run(jobs[:3], max_bytes=9, max_jobs=4))
"""
    with script(tmp_path, body) as running:
        wait_until(lambda: len(marks_in(tmp_path)) == 2)
        pids = children(running.pid)
        assert len(pids) == 3
        assert set(marks_in(tmp_path)) <= set(pids)
        running.kill()
        _, err = running.communicate(timeout=100)
        wait_until(lambda: not any(map(is_alive, pids)))
    assert err == ""
    new = set(os.listdir("/dev/shm")) - shared
    own = [f"pym-{pid}-" for pid in (running.pid, *pids)]  # excludes those of other tests
    assert not [name for name in new if any(word in name for word in ("shm_transport", *own))]


def test_workers_end_with_a_killed_parent_whose_fork_lives_on(tmp_path):
    body = """
workers = Workers(calls, 2)
list(workers.run([(partial(time.sleep, 0.1), 1)] * 2, max_bytes=9, max_jobs=4))
if os.fork() == 0:  # holds the sockets of its parent open
    os.close(1), os.close(2)
    time.sleep(80)
    os._exit(0)
list(workers.run(jobs, max_bytes=9, max_jobs=4))
"""
    with script(tmp_path, body, "-W", "ignore") as running:
        wait_until(lambda: len(marks_in(tmp_path)) == 2)
        running.kill()  # its output stays open as long as the fork lives
        wait_until(lambda: not any(map(is_alive, marks_in(tmp_path))))
        os.killpg(running.pid, signal.SIGKILL)


def test_a_fork_that_ends_leaves_the_workers_to_its_parent(tmp_path):
    body = """
workers = Workers(calls, 1)
job = [(os.getpid, 1)]
first = list(workers.run(job, max_bytes=9, max_jobs=4))
child = os.fork()
if child == 0:
    sys.exit(0)  # runs what was registered for the end of the parent
os.waitpid(child, 0)
say(first == list(workers.run(job, max_bytes=9, max_jobs=4)))
"""
    with script(tmp_path, body, "-W", "ignore") as running:
        out, err = running.communicate(timeout=100)
    assert (running.returncode, out, err) == (0, "True\n", "")
