"""The node's request budget: bucket arithmetic, and several real processes that share a budget.

Bounds on counts are exact and hold on a machine of any speed. No test asserts that something is
fast.
"""

import fcntl
import math
import multiprocessing
import os
import pickle
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from data_pipeline.access import budget_folder
from data_pipeline.config import DataConfig
from data_pipeline.store.budget import Bucket, Budget
from data_pipeline.store.objects import StoreError, StoreUnavailable
from tests import ROOT

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can make other users' links")
SPAWN = multiprocessing.get_context("spawn")


def test_a_bucket_serves_at_its_rate_and_saves_a_burst():
    bucket = Bucket.fresh(10.0, 5.0, 100.0)
    assert bucket.wait(5) == 0
    assert bucket.wait(6) == pytest.approx(0.1)  # tickets are served in order
    assert bucket.wait(7) == pytest.approx(0.2)
    busy = Bucket(10.0, 5.0, 10.0, drawn=25.0, served=5.0, at=100.0, cut_at=-math.inf)
    assert busy.wait(25) == pytest.approx(2.0)
    assert busy.later(101.0).served == 15
    assert busy.later(110.0).served == 30  # at most one burst above the count of draws
    assert busy.later(90.0) == Bucket(10.0, 5.0, 10.0, 25.0, 5.0, 90.0, -math.inf)


def test_a_bucket_is_cut_once_a_second_and_recovers():
    bucket = Bucket.fresh(64.0, 64.0, 0.0)
    cut = bucket.cut()
    assert (cut.rate, cut.served) == (32, 0)  # a cut also discards the saved tickets
    assert cut.later(0.9).cut() == cut.later(0.9)
    again = cut.later(1.0).cut()
    assert again.rate == pytest.approx((32 + 63 / 60) / 2)
    low = again
    for second in range(2, 40):
        low = low.later(float(second)).cut()
    assert 1.0 <= low.rate < 2.5  # near the floor, but never below it
    rates = [low.later(40.0 + passed).rate for passed in range(0, 70, 10)]
    steps = [b - a for a, b in zip(rates, rates[1:])]
    assert rates[-1] == 64
    assert steps[:4] == pytest.approx([10.5] * 4)  # recovery is linear in time


def test_takes_are_counted_and_waits_told(tmp_path):
    with Budget(tmp_path, 5.0, 2) as budget:
        begin = time.monotonic()
        waits = [budget.take("x") for _ in range(4)]
        took = time.monotonic() - begin
        assert took >= 2 / 5 - 1e-3  # two takes use saved tickets, two have to wait
        assert min(waits) >= 0
        assert sum(waits) <= took
        assert budget.bucket.drawn == 4


def test_a_wait_that_is_too_long_names_what_it_waits_for(tmp_path):
    with Budget(tmp_path, 0.01, 1) as budget:
        budget.take("s3://b/first")
        with pytest.raises(
            StoreUnavailable, match=r"s3://b/x: 0.1 s passed .* budget in .*0.01 of 0.01 requests/s"
        ):
            budget.take("s3://b/x", timeout=0.1)
        closing = threading.Event()
        threading.Timer(0.1, closing.set).start()
        with pytest.raises(StoreUnavailable, match="its store was closed"):
            budget.take("s3://b/x", 30, closing)


def test_bad_numbers_and_folders_are_refused(tmp_path):
    for rate, burst in ((0, None), (-1, None), (math.nan, None), (math.inf, None), (5, 0.5)):
        with pytest.raises(ValueError, match="must be above 0"):
            Budget(tmp_path, rate, burst)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        Budget(tmp_path / "file" / "folder", 1)
    budget = Budget(tmp_path, 1)
    budget.close()
    with pytest.raises(ValueError, match="is closed"):
        budget.take("x")


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StoreError, match="may be written by other users"):
        Budget(tmp_path / "open", 1)
    assert list((tmp_path / "open").iterdir()) == []


@pytest.mark.parametrize("planted", [None, "open", pytest.param("link", marks=AS_ROOT)])
def test_the_default_folder_is_of_one_s_own(tmp_path, monkeypatch, planted):
    """Anybody may have created the folder first in a shared folder for temporary files."""
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"kimi-pretrain-{os.getuid()}"
    config = DataConfig(
        root="s3://bucket/x",
        sources={"a": 1.0},
        seq_len=128,
        rows_per_step=8,
        requests_per_second=5,
    )
    if planted == "open":
        own.mkdir()
        own.chmod(0o777)
    elif planted == "link":
        (tmp_path / "aim").mkdir()
        own.symlink_to(tmp_path / "aim")
        os.lchown(own, 65534, 65534)
    if planted:
        with pytest.raises(StoreError, match="data.requests_per_second.*remove"):
            budget_folder(config)
        return
    with Budget(budget_folder(config), 5) as budget:
        assert budget.folder.parent == own
        for folder in (own, budget.folder):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@AS_ROOT
def test_in_a_container_without_root_the_host_s_folder_serves(tmp_path):
    """An owner outside the user namespace is accepted; any other foreign owner is refused."""
    code = (
        "import os, pathlib; from data_pipeline.store.private import private_folder\n"
        "assert os.stat('shared').st_uid not in (0, os.getuid())\n"
        "print(private_folder(pathlib.Path('shared')))"
    )
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 4321, 4321)
    root = str(ROOT)
    found = []
    for inside, mode in ((True, 0o1777), (True, 0o755), (False, 0o1777)):
        shared.chmod(mode)
        command = [*(["unshare", "--user", "--map-root-user"] if inside else []), sys.executable]
        done = subprocess.run(
            [*command, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": root},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if "unshare" in done.stderr:
            pytest.skip("no user namespaces here")
        found.append(done.stdout.strip() or done.stderr.splitlines()[-1])
    assert found[0] == f"shared/kimi-pretrain-{os.getuid()}"
    assert "belongs to user 65534" in found[1]
    assert "belongs to user 4321" in found[2]


def test_those_who_share_must_agree_and_who_is_alone_starts_afresh(tmp_path):
    first = Budget(tmp_path, 100, 10)
    first.throttled()
    second = Budget(tmp_path, 100, 10)
    assert second.bucket.rate < 100  # joined the existing budget
    with pytest.raises(ValueError, match=r"open in other processes with 100 .* here with 50"):
        Budget(tmp_path, 50, 10)
    first.close()
    with pytest.raises(ValueError, match="open in other processes"):
        Budget(tmp_path, 50, 10)
    second.close()
    with Budget(tmp_path, 50, 10) as alone:
        assert alone.bucket.rate == 50


def test_a_file_from_before_a_reboot_is_not_believed(tmp_path):
    """The old clock was ahead and its tickets are far in the future: nobody may wait for them."""
    with Budget(tmp_path, 100, 10) as budget:
        ahead = Bucket(100.0, 10.0, 1e-3, 1e9, 0.0, time.monotonic() + 1e6, 0.0)
        budget._write(ahead)
    with Budget(tmp_path, 100, 10) as budget:
        assert budget.bucket.rate == 100
        budget.take("x", timeout=5)


def test_another_machine_is_refused(tmp_path, monkeypatch):
    with Budget(tmp_path, 100):
        monkeypatch.setattr("data_pipeline.store.budget._machine", lambda: b"another machine!")
        with pytest.raises(ValueError, match="in use on another machine"):
            Budget(tmp_path, 100)


@pytest.mark.parametrize(
    "damage", [b"", b"x" * 7, b"\xff" * 80], ids=["empty", "short", "nonsense"]
)
def test_a_damaged_file_is_started_afresh_and_waiters_go_on(tmp_path, damage):
    with Budget(tmp_path, 5, 1) as budget:
        for _ in range(3):
            budget._ticket(math.inf, "x", time.monotonic() + 5)
        waited = []
        waiter = threading.Thread(target=lambda: waited.append(budget.take("x", 30)))
        waiter.start()
        while budget.bucket.drawn < 4:
            time.sleep(0.01)
        # not while the waiter itself changes the file
        with budget._locked("damage", time.monotonic() + 50):
            (tmp_path / "requests.budget").write_bytes(damage)
        waiter.join(50)
        assert waited
        assert budget.bucket.drawn <= 1


def test_no_hedge_while_the_budget_is_low_or_throttled(tmp_path):
    with Budget(tmp_path, 10.0, 5) as budget:
        assert budget.spare()
        budget.throttled()
        assert not budget.spare()
    with Budget(tmp_path, 1e-3, 1) as budget:
        budget.take("x")
        assert not budget.spare()


def _take_many(budget, number, path, started):
    """In another process, write the time of each take immediately, so that a kill loses none."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    started.release()
    for _ in range(number):
        budget.take("a request", timeout=50)
        os.write(file, struct.pack("d", time.monotonic()))


def _most_above(times, rate):
    """Return the largest excess of takes over `rate` in any time interval."""
    return max(
        (j - i + 1) - rate * (times[j] - times[i])
        for i in range(len(times))
        for j in range(i, len(times))
    )


def test_processes_together_stay_within_the_rate_though_one_is_killed(tmp_path):
    """One process is killed while it waits, then the server throttles; the others keep taking.

    A take is recorded a moment after it was granted, so each process may appear to exceed by one.
    """
    rate, burst, number = 80.0, 8.0, 50
    paths = [tmp_path / f"takes-{i}" for i in range(4)]
    with Budget(tmp_path, rate, burst) as budget:
        started = SPAWN.Semaphore(0)
        copy = pickle.loads(pickle.dumps(budget))
        processes = [
            SPAWN.Process(target=_take_many, args=(copy, wanted, path, started))
            for wanted, path in zip((10**6, number, number, number), paths, strict=True)
        ]
        for process in processes:
            process.start()
        for _ in processes:
            assert started.acquire(timeout=100)
        while paths[0].stat().st_size < 80:
            time.sleep(0.01)
        os.kill(processes[0].pid, signal.SIGKILL)  # it spends nearly all its time waiting
        budget.throttled()
        cut = budget.bucket
        for process in processes:
            process.join(100)
        end = budget.bucket
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0, 0]
    times = sorted(t for path in paths for (t,) in struct.iter_unpack("d", path.read_bytes()))
    assert len(times) >= 3 * number + 10
    assert _most_above(times, rate) <= burst + len(paths)
    slow = [t for t in times if t > cut.at]
    assert cut.rate < 0.6 * rate
    # A cut leaves no saved tickets. Count from the cut on: later, processes may save again while no
    # core is free for them.
    above = max(n - end.rate * (t - cut.at) for n, t in enumerate(slow, start=1))
    assert above <= 1 + len(paths)
    assert end.rate <= cut.rate + (end.at - cut.at) * rate / 60


def _hold_the_lock(folder, held):
    file = os.open(f"{folder}/requests.budget", os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    held.set()
    time.sleep(600)


def test_a_process_that_hangs_with_the_lock_is_named_and_its_death_frees_it(tmp_path):
    with Budget(tmp_path, 1000.0) as budget:
        held = SPAWN.Event()
        holder = SPAWN.Process(target=_hold_the_lock, args=(tmp_path, held))
        holder.start()
        assert held.wait(100)
        with pytest.raises(StoreUnavailable, match="in vain for the lock .*requests.budget.*hangs"):
            budget.take("x", timeout=0.2)
        os.kill(holder.pid, signal.SIGKILL)
        budget.take("x", timeout=30)
        holder.join(50)


def test_a_fork_has_a_lock_of_its_own(tmp_path):
    with Budget(tmp_path, 1000.0) as budget:
        child = os.fork()
        if child == 0:  # no code of pytest may run in the child
            code = 1
            try:
                before = budget._files
                budget.take("x", timeout=20)
                code = 0 if budget._pid == os.getpid() and before is not None else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert budget.bucket.drawn == 1
        with pytest.raises(ValueError, match="open in other"):  # the child's exit released nothing
            Budget(tmp_path, 7.0)
