"""Tests that a second run in a folder or checkpoint place is refused and names the first run."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.checkpoint.writer_process import check_owner
from kimi_pretrain.reliability import run_files, run_lock
from kimi_pretrain.reliability.exit_report import first_exit_report
from kimi_pretrain.reliability.run_history import claim_place
from kimi_pretrain.reliability.run_lock import (
    FormerStart,
    RunLocked,
    check_free,
    claim,
    run_id,
    take,
)
from kimi_pretrain.reliability.start_identity import START, holds
from kimi_pretrain.reliability.status import Status, mark_failed, read_status, write_status
from launch.local.user_errors import exit_code, user_message
from tests import ROOT

LATER = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}
HOLD = """
import pathlib, sys
from kimi_pretrain.reliability.run_lock import take
lock = take(pathlib.Path(sys.argv[1]), {"SLURM_JOB_ID": "77"})
print("held", flush=True)
sys.stdin.read()
"""


class Clock:
    """Clock that advances only during sleeps."""

    def __init__(self, monkeypatch):
        self.slept, self.asleep = 0.0, lambda: None
        monkeypatch.setattr(
            run_lock, "time",
            SimpleNamespace(monotonic=lambda: self.slept, sleep=self.sleep, strftime=time.strftime),
        )  # fmt: skip

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.asleep()


@pytest.fixture
def holder(tmp_path):
    """Yield another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_until_the_first_has_ended(holder, tmp_path):
    for refused in (check_free, lambda folder: take(folder, {})):
        with pytest.raises(RunLocked, match=rf"process {holder.pid} on .*SLURM job 77, since 20"):
            refused(tmp_path)
    holder.kill()  # it cannot clean up
    holder.wait()
    check_free(tmp_path)
    lock = take(tmp_path, {})
    with pytest.raises(RunLocked):
        check_free(tmp_path)
    lock.release()
    take(tmp_path, {}).release()


def test_a_requeued_job_waits_for_its_own_former_start(holder, tmp_path, monkeypatch):
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        holder.kill()
        holder.wait()

    monkeypatch.setattr(run_lock.time, "sleep", sleep)
    take(tmp_path, LATER).release()
    assert waited


def test_a_lock_without_a_sign_of_life_is_taken_over_by_the_same_job(
    holder, tmp_path, monkeypatch, caplog
):
    """Simulates a lost node whose lock never ends: its holder lives but shows no activity."""
    os.utime(tmp_path / "lock", (1000, time.time() - run_lock.SILENT_S - 5))
    clock = Clock(monkeypatch)
    for other in ({**LATER, "SLURM_JOB_ID": "78"}, {"SLURM_JOB_ID": "77"}):
        with pytest.raises(RunLocked) as refused:  # not even for two commands of one job
            take(tmp_path, other)
        assert not isinstance(refused.value, FormerStart)
    assert clock.slept == 0
    lock = take(tmp_path, LATER)
    assert run_lock.WATCHED_S <= clock.slept < run_lock.PATIENCE_S
    assert f"process {holder.pid} on" in caplog.text
    assert "no sign of life: taken over" in caplog.text
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    with pytest.raises(RunLocked, match=f"process {os.getpid()} on"):
        check_free(tmp_path)
    lock.release()
    check_free(tmp_path)


def test_a_clock_set_ahead_takes_no_lock_from_a_run_that_lives(holder, tmp_path, monkeypatch):
    """By such a clock all heartbeats are old until the next one comes."""
    path, clock = tmp_path / "lock", Clock(monkeypatch)
    os.utime(path, (1000, time.time() - 7 * 86400))

    def beat() -> None:
        if clock.slept >= run_lock.BEAT_S:
            os.utime(path)

    clock.asleep = beat
    with pytest.raises(FormerStart):
        take(tmp_path, LATER)
    assert clock.slept >= run_lock.PATIENCE_S


def test_a_former_start_that_lives_is_not_pushed_out(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.5)
    lock = take(tmp_path, {"SLURM_JOB_ID": "77"})
    before = (tmp_path / "lock").stat().st_mtime_ns
    with pytest.raises(FormerStart, match=f"process {os.getpid()} on"):
        take(tmp_path, LATER)
    end = time.monotonic() + 50
    while (tmp_path / "lock").stat().st_mtime_ns <= before:  # its heartbeat
        assert time.monotonic() < end
        time.sleep(0.01)
    lock.release()


def test_one_whose_lock_was_taken_over_ends_when_it_wakes(tmp_path, monkeypatch, capsys):
    """The first start's node was only cut off; two runs must not continue in one folder."""
    first = tmp_path / "lock"
    file = first.open("a+")
    assert run_lock._try_lock(file)
    file.write('{"job": "77", "start": 0}')
    file.flush()
    os.utime(first, (1000, 1000))
    with monkeypatch.context() as patched:
        Clock(patched)
        patched.setenv(START, "later")
        later = take(tmp_path, LATER)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    left, codes = threading.Event(), []
    woken = run_lock.RunLock(file, first, lambda code: codes.append(code) or left.set())
    assert left.wait(30)
    assert codes == [75]
    assert "was taken over by a later start of this job" in capsys.readouterr().err
    assert first_exit_report(tmp_path) is None  # the folder belongs to the other start
    woken.release()
    later.release()


@pytest.mark.parametrize(
    ("error", "replaced", "ends"),
    [
        (errno.ESTALE, False, True),  # NFS reports this if the file was replaced elsewhere
        (errno.ESTALE, True, True),
        (errno.EIO, True, True),  # ownership is checked even if the heartbeat fails
        (errno.EIO, False, False),
    ],
)
def test_a_lock_whose_file_is_gone_on_the_server_is_lost(
    tmp_path, monkeypatch, capsys, error, replaced, ends
):
    lock, asked, left = take(tmp_path, {}), threading.Semaphore(0), threading.Event()
    lock.release()
    file = (tmp_path / "lock").open("a+")
    if replaced:
        (tmp_path / "other").touch()
        (tmp_path / "other").replace(tmp_path / "lock")

    def fail(*args, **kwargs):
        asked.release()
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "utime", fail)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    held = run_lock.RunLock(file, tmp_path / "lock", lambda code: left.set())
    for _ in range(3):
        while not (left.is_set() or asked.acquire(timeout=0.05)):
            pass
    if ends:
        assert left.wait(30)
        assert "was taken over" in capsys.readouterr().err
    held.release()
    assert left.is_set() == ends


@pytest.mark.parametrize("what", ["moved", "moved, and written to", "removed", "lock", "mount"])
def test_a_folder_that_is_moved_under_a_run_is_not_said_to_be_taken_over(
    tmp_path, monkeypatch, capsys, what
):
    run_dir, codes, left = tmp_path / "runs" / "a", [], threading.Event()
    take(run_dir, {}).release()
    file = (run_dir / "lock").open("a+")
    if what.startswith("moved"):
        run_dir.rename(tmp_path / "b")
        if what != "moved":
            write_status(run_dir, Status("running", 3))
    elif what == "lock":
        (run_dir / "lock").unlink()
    elif what == "removed":
        shutil.rmtree(run_dir)
    else:  # a whole file system is away for a while
        (tmp_path / "runs").rename(tmp_path / "elsewhere")
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    renewed, utime = threading.Semaphore(0), os.utime
    monkeypatch.setattr(os, "utime", lambda *a, **k: (renewed.release(), utime(*a, **k)))
    leave = lambda code: codes.append(code) or left.set()  # noqa: E731
    held = run_lock.RunLock(file, run_dir / "lock", leave)
    if what == "mount":
        for _ in range(5):
            assert renewed.acquire(timeout=30)
    else:
        assert left.wait(30)
    held.release()
    told = capsys.readouterr().err
    assert "taken over" not in told
    assert codes == {"mount": [], "lock": [75]}.get(what, [2])
    if what.startswith("moved"):
        assert f"go on with --run-dir {tmp_path / 'b'} --resume latest" in told
    elif what != "mount":
        assert f"{run_dir}{'/lock' if what == 'lock' else ''} was " in told
        assert "removed" in told


def test_a_new_start_forgets_what_earlier_ones_left(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("error_rank_1.txt", "held_rank_2.txt", "stalled_rank_3.json", "rank_0.log"):
        (logs / name).write_text("{}")
    lock = take(tmp_path, {})
    assert [file.name for file in logs.iterdir()] == ["rank_0.log"]
    assert holds(tmp_path)
    assert not holds(tmp_path, "another")
    with pytest.raises(RunLocked):
        take(tmp_path, {})
    assert holds(tmp_path)
    lock.release()


def test_a_folder_that_no_run_has_used_is_free(tmp_path):
    check_free(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_run_keeps_its_id(tmp_path):
    first, other = run_id(tmp_path), tmp_path / "other"
    assert run_id(tmp_path) == first
    other.mkdir()
    assert run_id(other) != first


def test_a_place_belongs_to_the_run_that_first_saved_there(tmp_path):
    place, mine, other = open_place(tmp_path / "place"), tmp_path / "a", tmp_path / "b"
    for folder in (mine, other):
        folder.mkdir()
    claim(place, mine)
    claim(place, mine)  # again, when it resumes
    assert json.loads((tmp_path / "place" / "owner.json").read_text())["run"] == run_id(mine)
    with pytest.raises(RunLocked, match=rf"of another run .*run folder {mine} .*checkpoint\.place"):
        claim(place, other)
    (tmp_path / "place" / "owner.json").write_text("{}")
    with pytest.raises(RunLocked, match="remove the file"):
        claim(place, mine)
    (tmp_path / "place" / "owner.json").unlink()
    assert list((tmp_path / "place").iterdir()) == []
    claim(place, other)
    (tmp_path / "file").touch()
    with pytest.raises(RunLocked, match="cannot be written"):
        claim(open_place(tmp_path / "file" / "place"), mine)


@pytest.mark.parametrize("where", ["folder", "store"])
def test_a_copy_of_a_run_folder_does_not_own_its_place(tmp_path, where):
    """The copy would set aside newer checkpoints of the first run, which may still continue."""
    place = open_place(tmp_path / "place" if where == "folder" else "memory://copies/place")
    first, copy = tmp_path / "run_a", tmp_path / "run_b"
    first.mkdir()
    claim(place, first)
    shutil.copytree(first, copy)
    text = place.read_text("owner.json")
    told = rf"checkpoints of {first}, of which {copy} is a copy; .*--resume.*remove run\.json there"
    with pytest.raises(RunLocked, match=told):
        claim(place, copy)
    assert place.read_text("owner.json") == text
    (tmp_path / "link").symlink_to(first)
    claim(place, tmp_path / "link")  # the same folder
    claim(open_place(tmp_path / "own"), copy)
    (first / "run.json").unlink()  # it can never resume
    claim(place, copy)
    moved = copy.rename(tmp_path / "moved")
    claim(place, moved)
    assert json.loads(place.read_text("owner.json") or "")["run_dir"] == str(moved)
    place.close()


@pytest.mark.parametrize("where", ["folder", "store"])
def test_of_a_run_and_its_copy_elsewhere_the_later_start_has_the_place(tmp_path, where):
    """Another cluster can see neither the first folder nor its lock."""
    place = open_place(tmp_path / "place" if where == "folder" else "memory://far/place")
    first, copy = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    former = claim(place, first)
    mine = claim(place, first)  # requeued
    check_owner(place, mine)
    with pytest.raises(CheckpointError, match="was taken by another start of this run"):
        check_owner(place, former)
    first.rename(copy)  # as the other cluster sees it
    other = claim(place, copy)
    copy.rename(first)
    check_owner(place, other)
    told = rf"another start of this run \(run folder {copy} on .*\).*checkpoint.place of its own"
    with pytest.raises(CheckpointError, match=told):
        check_owner(place, mine)
    place.write_text("owner.json", json.dumps({"run": mine.run}))  # of an earlier version
    check_owner(place, claim(place, first))
    place.close()


def test_a_start_that_is_refused_does_not_claim_the_place(tmp_path):
    """The run that owns these checkpoints, without an owner.json, may come later."""
    place = open_place(tmp_path / "place")
    (tmp_path / "run").mkdir()
    done = tmp_path / "place" / "step_00000003"
    done.mkdir(parents=True)
    (done / "manifest.json").touch()
    with pytest.raises(ValueError, match="holds checkpoints"):
        claim_place(place, tmp_path / "run", None, False)
    assert place.read_text("owner.json") is None
    (tmp_path / "mine").mkdir()
    claim_place(place, tmp_path / "mine", "latest", False)
    with pytest.raises(RunLocked, match="of another run"):  # checked before the checkpoints there
        claim_place(place, tmp_path / "run", None, False)


def test_checkpoints_that_were_copied_with_their_run_folder_are_its_own(tmp_path):
    first, copy = tmp_path / "run_a", tmp_path / "run_b"
    first.mkdir()
    claim(open_place(first / "checkpoints"), first)
    shutil.copytree(first, copy)
    for folder in (copy, first):
        claim(open_place(folder / "checkpoints"), folder)
        owner = json.loads((folder / "checkpoints" / "owner.json").read_text())
        assert owner["run_dir"] == str(folder)


@pytest.mark.parametrize("where", ["folder", "store"])
def test_of_runs_that_claim_a_place_at_once_one_gets_it(tmp_path, where):
    """All of them see that the place has no owner before any of them writes."""
    runs = [tmp_path / f"run{number}" for number in range(8)]
    place = open_place(tmp_path / "place" if where == "folder" else "memory://claims/place")
    together = threading.Barrier(len(runs))
    plain, looked = place.read_text, threading.local()

    def read_text(name: str) -> str | None:
        text = plain(name)
        if not hasattr(looked, "once"):
            looked.once = True
            together.wait(30)
        return text

    place.read_text = read_text

    def one(run_dir: Path) -> str | None:
        run_dir.mkdir()
        try:
            claim(place, run_dir)
        except RunLocked as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(runs)) as pool:
        told = list(pool.map(one, runs))
    assert told.count(None) == 1
    winner = runs[told.index(None)]
    assert all(f"run folder {winner} on" in line for line in told if line is not None)


def test_a_status_that_cannot_be_read_now_is_read_again_and_named(tmp_path, monkeypatch):
    write_status(tmp_path, Status("running", 4))
    failures, slept, real = [errno.EIO] * 3, [], Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if failures:
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr("data_pipeline.store.patient.time.sleep", slept.append)
    assert read_status(tmp_path) == Status("running", 4)
    assert len(slept) == 3
    monkeypatch.setattr(run_files, "PATIENCE_S", 0.0)
    failures += [errno.EIO] * 9
    with pytest.raises(OSError, match="Input/output error") as error:
        read_status(tmp_path)
    assert error.value.filename == str(tmp_path / "status.json")
    assert exit_code(error.value) == 75
    assert f"{tmp_path}/status.json: Input/output error" in user_message(error.value)
    before = real(tmp_path / "status.json")
    mark_failed(tmp_path, "the cause itself is told, and not this")
    assert real(tmp_path / "status.json") == before


def test_status_is_replaced_whole_and_a_failure_keeps_how_far_it_came(tmp_path):
    assert read_status(tmp_path) is None
    write_status(tmp_path, Status("running", 4, 9, checkpoint="x/step_00000004"))
    mark_failed(tmp_path, "no bucket")
    assert read_status(tmp_path) == Status("failed", 4, 9, "no bucket", "x/step_00000004")
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]
    newer = json.loads((tmp_path / "status.json").read_text()) | {"more": 1}
    (tmp_path / "status.json").write_text(json.dumps(newer))
    assert read_status(tmp_path) == Status("failed", 4, 9, "no bucket", "x/step_00000004")
