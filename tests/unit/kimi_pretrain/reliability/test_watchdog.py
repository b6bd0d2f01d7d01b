"""Tests when a run counts as stalled, which rank is blamed, and which files remain."""

import faulthandler
import itertools
import os
import random
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_pipeline.store.open import StoreError, open_store
from data_pipeline.store.retry import Tries, longest_silence
from kimi_pretrain.reliability import watchdog
from kimi_pretrain.reliability.exit_report import (
    NO_PROGRESS,
    ExitReport,
    error_file,
    first_exit_report,
    held_file,
    remove_exit_reports,
    report_files,
    write_exit_report,
)
from kimi_pretrain.reliability.stack_inspection import ROOT, _ours, stack_of, waits, where
from kimi_pretrain.reliability.start_identity import REPORTS, START
from kimi_pretrain.reliability.status import Status, read_status, write_status
from kimi_pretrain.reliability.watchdog import (
    READING_RANKS,
    WAIT_FOR_DATA,
    Stall,
    Watchdog,
    describe,
    read_stalls,
    reads_reports,
    stall_file,
    suspects,
)
from launch.local import supervise
from tests.held_folder import hold
from tests.silent import KEYS, SilentServer

WATCHDOG = "kimi_pretrain.reliability.watchdog"


@pytest.fixture(autouse=True)
def this_start(tmp_path, monkeypatch):
    """Make this process part of a start that holds the folder."""
    monkeypatch.setenv(START, "this")
    hold(tmp_path, "this")


def halt(rank: int, phase: str = "4 backbone", step: int = 3, seconds: float = 20, **more):
    at = more.get("where", "a.py:1 (f)")
    return Stall(rank, step, phase, seconds, at, more.get("waits", True))


def told(mine: Stall, *others: Stall, world: int = 4) -> str:
    return describe(mine, {one.rank: one for one in others}, world)


def test_a_rank_that_says_nothing_is_named():
    line = told(halt(1), halt(0), halt(3))
    assert "rank 1 is in step 3, phase '4 backbone', at a.py:1 (f)" in line
    assert "no progress for 20 s (train.timeout_seconds)" in line
    assert "no word from rank 2: stopped, dead, cut off" in line
    assert "\n" not in line


def test_many_silent_ranks_are_counted():
    line = told(halt(0), world=100)
    assert "no word from ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 others" in line


def test_a_rank_that_waits_for_nobody_holds_the_others_up():
    line = told(halt(0), halt(1), halt(2, where="b.py:7 (sleep)", waits=False), halt(3))
    assert "held up by rank 2, in step 3, phase '4 backbone', at b.py:7 (sleep)" in line


def test_a_rank_in_an_earlier_phase_holds_the_others_up():
    slow = halt(2, "2 vision forward", seconds=21)
    line = told(halt(0, "3 hand-over"), halt(1, "3 hand-over"), slow, halt(3, "3 hand-over"))
    assert "held up by rank 2, in step 3, phase '2 vision forward'" in line
    late = halt(3, "8 report", step=2)
    assert suspects([halt(0), halt(1), halt(2, seconds=30), late]) == [late]


def test_ranks_that_are_all_alike_are_not_blamed():
    everyone = [halt(rank) for rank in range(4)]
    assert suspects(everyone) == []
    assert "all 4 ranks wait in this phase" in told(*everyone)


def test_a_single_process_is_to_blame_itself():
    line = told(halt(0, "1 wait for data", step=1, waits=False), world=1)
    assert line.endswith("it waits for no other rank")
    before = told(halt(0, "build", step=0, waits=False), world=1)
    assert "rank 0 is in phase 'build'" in before


@pytest.mark.parametrize(("world_size", "count"), [(1, 1), (2, 2), (16, 16), (17, 9), (4096, 16)])
def test_of_many_ranks_some_look_for_the_guilty(world_size, count):
    chosen = [rank for rank in range(world_size) if reads_reports(rank, world_size)]
    assert (len(chosen), chosen[0]) == (count, 0)
    assert max(np.diff([*chosen, world_size])) <= -(
        -world_size // READING_RANKS
    )  # spread over the job


def watched(tmp_path, seconds: float, work, rank: int = 0, world_size: int = 2) -> list[int]:
    """Run `work(watchdog)` under a watchdog; return the exit codes that it asks for."""
    codes: list[int] = []
    dog = Watchdog(tmp_path, rank, world_size, seconds, codes.append).start()
    work(dog)
    dog.stop()
    return codes


def until(true, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_halt_ends_the_process_with_its_stacks_and_its_reason(tmp_path):
    def work(dog: Watchdog) -> None:
        dog.begin_step(6)
        dog.enter("2 vision forward")
        until(lambda: not dog._thread.is_alive())

    assert watched(tmp_path, 0.4, work) == [NO_PROGRESS]
    word = first_exit_report(tmp_path)
    assert word is not None
    assert word.code == NO_PROGRESS == 75
    assert "rank 0 is in step 6, phase '2 vision forward'" in word.message
    assert "no word from rank 1" in word.message
    assert "test_watchdog.py" in word.message  # the current line
    stacks = (tmp_path / "logs" / "stacks_rank_0.txt").read_text()
    assert "phase '2 vision forward'" in stacks
    assert "in until" in stacks
    assert read_stalls(tmp_path, 2)[0].phase == "2 vision forward"


def test_of_a_large_job_the_others_leave_later_and_say_where_they_stood(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{WATCHDOG}.GRACE_S", 0.6)
    read: list[int] = []
    monkeypatch.setattr(
        "kimi_pretrain.reliability.watchdog.read_stalls", lambda *at: read.append(1) or {}
    )
    began = time.monotonic()

    def work(dog: Watchdog) -> None:
        dog.begin_step(6)
        dog.enter("4 backbone")
        until(lambda: not dog._thread.is_alive())

    assert watched(tmp_path, 0.4, work, rank=5, world_size=64) == [NO_PROGRESS]
    assert time.monotonic() - began >= 1.0
    word = first_exit_report(tmp_path)
    assert word is not None
    assert "rank 5 is in step 6, phase '4 backbone'" in word.message
    assert "no word" not in word.message
    assert not read


def test_where_files_hang_a_rank_has_said_at_least_where_it_stood(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{WATCHDOG}.WRITING_S", 0.3)
    hang = threading.Event()
    monkeypatch.setattr(
        "kimi_pretrain.reliability.watchdog.read_stalls", lambda *at: hang.wait(30) and {}
    )
    done = watched(tmp_path, 0.4, lambda dog: until(lambda: not dog._thread.is_alive()))
    hang.set()
    assert done == [NO_PROGRESS]
    word = first_exit_report(tmp_path)
    assert word is not None
    assert "rank 0 is in phase 'start'" in word.message


def test_progress_is_any_new_phase_even_of_the_same_name(tmp_path):
    def work(dog: Watchdog) -> None:
        for _ in range(40):
            dog.enter("8 save")
            time.sleep(0.05)

    assert watched(tmp_path, 1.0, work) == []
    assert not error_file(tmp_path, 0).exists()


def test_a_rank_that_goes_on_takes_its_word_back(tmp_path):
    def work(dog: Watchdog) -> None:
        until(stall_file(tmp_path, 0).exists)  # after four fifths of the limit
        dog.enter("4 backbone")
        until(lambda: not stall_file(tmp_path, 0).exists())

    assert watched(tmp_path, 3.0, work) == []


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path, monkeypatch):
    """After `scontrol suspend` the clock jumps, but the ticks do not."""
    jumps = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(
        "kimi_pretrain.reliability.watchdog.time.monotonic", lambda: float(next(jumps))
    )
    ticks = []

    def work(dog: Watchdog) -> None:
        wait = dog._end.wait
        dog._end.wait = lambda seconds: ticks.append(seconds) or wait(0.001)
        while len(ticks) < 8:
            threading.Event().wait(0.001)

    assert watched(tmp_path, 3e3, work) == []  # ticks of a second, jumps of a thousand
    assert not stall_file(tmp_path, 0).exists()


@pytest.mark.parametrize("private", [True, False])
def test_a_rank_whose_start_does_not_hold_the_folder_writes_nothing_there(
    tmp_path, monkeypatch, private
):
    """srun may start such a rank in the folder of a running job; it belongs to no start."""
    write_status(tmp_path, Status("running", 3))
    hold(tmp_path, "another")
    (tmp_path / "reports").mkdir()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.delenv(START)  # its start has no name
    if private:
        monkeypatch.setenv(REPORTS, str(tmp_path / "reports"))
    before = {file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}

    def work(dog: Watchdog) -> None:
        dog.enter("join the job")
        until(lambda: not dog._thread.is_alive())

    assert watched(tmp_path, 0.4, work) == [NO_PROGRESS]
    assert {file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before
    assert not (tmp_path / "logs").exists()
    assert (first_exit_report(tmp_path / "reports") is not None) == private


def test_stacks_go_into_the_folder_once_the_start_holds_it(tmp_path, monkeypatch):
    hold(tmp_path, "another")
    (tmp_path / "reports").mkdir()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.setenv(REPORTS, str(tmp_path / "reports"))

    def work(dog: Watchdog) -> None:
        assert held_file(tmp_path / "reports", 0).is_file()
        hold(tmp_path, "this")
        dog.joined()
        assert held_file(tmp_path, 0).read_text() == "start this\n"
        assert not held_file(tmp_path / "reports", 0).exists()

    assert watched(tmp_path, 60.0, work) == []
    assert not held_file(tmp_path, 0).exists()


def frames(*lines: tuple[str, int, str]) -> list[tuple[str, int, str]]:
    return list(lines)


def test_who_waits_for_others():
    torch = "/x/site-packages/torch/distributed/distributed_c10d.py"
    p2p = "/x/megatron/core/pipeline_parallel/p2p_communication.py"
    assert waits(frames((torch, 1, "all_reduce"), ("/y/train.py", 2, "f")))
    assert waits(frames((p2p, 1, "recv_forward")))
    assert not waits(frames(("/usr/lib/python3/threading.py", 1, "wait"), ("/y/a.py", 1, "f")))
    assert not waits([])
    mine = stack_of(__import__("sys")._getframe())
    assert mine[0][2] == "test_who_waits_for_others"
    assert not waits(mine)
    assert "test_watchdog.py" in where(mine)
    inside = where(frames((torch, 7, "all_reduce"), mine[0]))
    assert inside.startswith("torch/distributed/distributed_c10d.py:7 (all_reduce) called from ")


SITE = "/x/.venv/lib/python3.11/site-packages"
STDLIB = sysconfig.get_path("stdlib")
OURS = (f"{ROOT}/kimi_pretrain/step.py", 1, "run")
# Stacks in which the host waits for a CUDA device, innermost frame first.
FEEDING = {
    "a copy of ours": [(f"{ROOT}/kimi_pretrain/update.py", 1, "step"), OURS],
    "the encoder": [(f"{ROOT}/moonvit3d/tower.py", 1, "forward"), OURS],
    "Megatron's dispatcher": [
        (f"{SITE}/megatron/core/transformer/moe/token_dispatcher.py", 1, "preprocess"),
        (f"{SITE}/torch/nn/modules/module.py", 1, "_call_impl"), OURS,
    ],
    "a checkout of Megatron": [("/opt/megatron-lm/megatron/core/tensors.py", 1, "f"), OURS],
    "Transformer Engine": [(f"{SITE}/transformer_engine/pytorch/attention.py", 1, "f"), OURS],
    "backward": [(f"{SITE}/torch/autograd/graph.py", 1, "_engine_run_backward"), OURS],
    "a full queue": [
        ("/tmp/torchinductor_me/ab/cab.py", 1, "call"), ("<eval_with_key>.3", 1, "forward"),
        (f"{SITE}/torch/_inductor/runtime/triton_heuristics.py", 1, "run"), OURS,
    ],
    "a collective": [(f"{SITE}/torch/distributed/distributed_c10d.py", 1, "barrier"), OURS],
}  # fmt: skip
READ = (f"{ROOT}/data_pipeline/store/s3_read.py", 1, "get")
BUSY = {
    "a read": [(f"{STDLIB}/ssl.py", 1, "read"), READ, OURS],
    "a read in C": [READ, OURS],
    "a lock": [(f"{STDLIB}/threading.py", 1, "wait"), OURS],
    "another package": [(f"{SITE}/numpy/lib/npyio.py", 1, "load"), OURS],
    "an import": [("<frozen importlib._bootstrap>", 1, "f"), OURS],
    "a sleep in a test": [(f"{ROOT}/tests/dist/planted.py", 1, "late"), OURS],
    "writing metrics": [(f"{ROOT}/kimi_pretrain/telemetry/run_dir.py", 1, "write"), OURS],
    "a checkpoint's file": [(f"{ROOT}/kimi_pretrain/checkpoint/file_access.py", 1, "read"), OURS],
    "compiling": [(f"{SITE}/torch/_inductor/scheduler.py", 1, "fuse"), OURS],
}


@pytest.mark.parametrize("name", FEEDING)
def test_on_a_device_who_feeds_it_waits(name):
    assert waits(FEEDING[name], on_device=True)


def test_where_files_are_written_only_a_copy_from_the_device_waits():
    file = ROOT / "kimi_pretrain" / "checkpoint" / "hashes.py"
    copies = [n for n, line in enumerate(file.read_text().splitlines(), 1) if ".cpu()" in line]
    assert waits([(str(file), copies[0], "hash_tensor"), OURS], on_device=True)
    assert not waits([(str(file), copies[0] + 1, "hash_tensor"), OURS], on_device=True)


@pytest.mark.parametrize("guilty", BUSY)
def test_of_eight_ranks_on_devices_the_one_that_reads_is_named_alone(guilty):
    stacks = [*list(FEEDING.values())[:7], BUSY[guilty]]
    everyone = [
        Stall(rank, 3, "4 backbone", 20.0 + rank, where(lines), waits(lines, on_device=True))
        for rank, lines in enumerate(stacks)
    ]
    for mine in everyone[:7]:
        line = told(mine, *everyone, world=8)
        assert f"held up by rank 7, in step 3, phase '4 backbone', at {where(stacks[7])}" in line


def test_of_ranks_that_all_wait_for_their_devices_the_earliest_is_named():
    stacks = list(FEEDING.values())
    everyone = [
        Stall(rank, 3, "4 backbone", 20.0, where(lines), waits(lines, on_device=True))
        for rank, lines in enumerate(stacks)
    ]
    assert suspects(everyone) == []
    everyone[5] = replace(everyone[5], phase="2 vision forward", seconds=21.0)
    assert [halt.rank for halt in suspects(everyone)] == [5]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_rank_knows_whether_it_computes_on_a_device(on_device, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{WATCHDOG}._on_device", lambda: on_device)
    monkeypatch.setattr(f"{WATCHDOG}.stack_of", lambda frame: [OURS])
    dog = Watchdog(tmp_path, 0, 1, 60)
    assert dog._stall((0, 1, "4 backbone"), 1.0).waits is on_device


def test_the_watchdog_loads_no_torch():
    code = (
        "import sys, types, kimi_pretrain.reliability.watchdog as w\n"
        "assert 'torch' not in sys.modules and not w._on_device()\n"
        "torch = sys.modules['torch'] = types.ModuleType('torch')\n"
        "assert not w._on_device()\n"  # partly loaded
        "torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)\n"
        "assert w._on_device()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


HELD = """
import ctypes, sys, time
from pathlib import Path
from kimi_pretrain.reliability import watchdog

def hold():
    ctypes.PyDLL(None).sleep(100)  # PyDLL keeps Python's lock

class Dog(watchdog.Watchdog):
    winds = 0

    def _wind(self):
        super()._wind()
        self.winds += 1

# 30 s: it is held before the watchdog ends it, on any machine.
watchdog.held_after = lambda seconds: 4.0
dog = Dog(Path(sys.argv[1]), 3, 8, 30.0).start()
dog.enter("4 backbone")
while dog.winds < 2:  # its thread is at work: it would never begin while Python's lock is kept
    time.sleep(0.01)
hold()
"""


def test_c_code_that_keeps_python_s_lock_is_ended_and_named_under_torchrun(tmp_path):
    command = [sys.executable, "-c", HELD, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "any"}
    began = time.monotonic()
    code, message = supervise.run(command, environment, tmp_path)
    assert code == NO_PROGRESS
    assert message is not None
    stacks = tmp_path / "logs" / "held_rank_3.txt"
    assert message == (
        "no progress (train.timeout_seconds): rank 3 is in C code that keeps Python's lock, at "
        f"<string>:7 (hold); all stacks are in {stacks}"
    )
    assert "in _look" in stacks.read_text()
    assert time.monotonic() - began < 50  # of a hundred
    remove_exit_reports(tmp_path)
    assert first_exit_report(tmp_path) is None


def test_without_torchrun_its_stacks_are_shown(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TORCHELASTIC_RUN_ID", None)
    done = subprocess.run(
        [sys.executable, "-c", HELD, str(tmp_path)],
        capture_output=True, text=True, timeout=90, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (0:00:04)!\n")
    assert "line 7 in hold" in done.stderr


def test_a_watchdog_that_ends_leaves_no_clock_and_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    wound, cancelled = [], []
    real, cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later

    def wind(seconds: float, **more) -> None:
        wound.append(seconds)
        real(seconds, **more)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", wind)
    monkeypatch.setattr(
        faulthandler, "cancel_dump_traceback_later", lambda: cancelled.append(1) or cancel()
    )
    assert watched(tmp_path, 20.0, lambda dog: until(lambda: len(wound) >= 2)) == []
    assert set(wound) == {20.0 + 10.0 + 5.0}
    assert cancelled
    assert not (tmp_path / "logs" / "held_rank_0.txt").exists()


def test_the_first_last_word_counts(tmp_path):
    assert first_exit_report(tmp_path) is None
    write_exit_report(tmp_path, 2, ExitReport("no  bucket\nhere", 75))
    time.sleep(0.02)
    write_exit_report(tmp_path, 0, ExitReport("lost rank 2"))
    assert first_exit_report(tmp_path) == ExitReport("no bucket here", 75)
    error_file(tmp_path, 2).unlink()
    assert first_exit_report(tmp_path) == ExitReport("lost rank 2", 2)
    assert first_exit_report(tmp_path, start="this") == ExitReport("lost rank 2", 2)
    assert first_exit_report(tmp_path, start="th") is None
    error_file(tmp_path, 0).write_text("by hand\n")
    assert first_exit_report(tmp_path) == ExitReport("by hand", 2)
    assert first_exit_report(tmp_path, start="this") is None
    known = report_files(tmp_path).values()
    assert first_exit_report(tmp_path, known=known) is None


@pytest.mark.parametrize("name", ["kimi_pretrain", "tests"])
def test_frames_of_the_project_are_known(name):
    assert _ours(str(ROOT / name / "x.py"))
    assert not _ours("/usr/lib/python3.11/threading.py")


@pytest.fixture
def unanswered(monkeypatch):
    """Yield the address of a store that a patient read in a thread waits for."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(watchdog, "STORE_S", 0.3)
    with SilentServer() as server:
        store = open_store("s3://bucket", endpoint=server.endpoint, patience=3600, hedge=False)

        def read() -> None:
            with suppress(StoreError):
                store.get("rows.tar", 0, 10)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert server.asked.wait(30)
        yield server.endpoint
        store.close()
    reader.join(30)


@pytest.mark.parametrize("step", [0, 3])
def test_a_rank_told_to_stop_waits_for_no_store_that_is_silent(tmp_path, unanswered, step):
    codes: list[int] = []
    dog = Watchdog(tmp_path, 0, 1, 10, codes.append, stop=lambda: "signal SIGTERM").start()
    dog.begin_step(step)
    dog.enter(WAIT_FOR_DATA if step else "open the data")
    until(lambda: codes)
    dog.stop()
    word = first_exit_report(tmp_path)
    assert codes == [NO_PROGRESS]
    assert word is not None
    assert word.code == NO_PROGRESS
    assert f"s3://bucket/rows.tar (asked {unanswered}, as configured" in word.message
    assert "stopped (signal SIGTERM) in " in word.message
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.reason) == ("failed", word.message)


def test_who_can_finish_the_step_goes_on(tmp_path, unanswered):
    until(lambda: longest_silence()[1] > 0.3)
    silent = Watchdog(tmp_path, 0, 1, 10, stop=lambda: "signal SIGTERM")
    assert silent._unanswered((9, 3, WAIT_FOR_DATA), 5.0, 5.0)
    assert silent._unanswered((9, 0, "find the checkpoint"), 5.0, 0.0)
    # The prefetch of the next step may fail, since this step does not wait for it; nor does a save.
    assert silent._unanswered((9, 3, "4 backbone"), 5.0, 5.0) is None
    assert silent._unanswered((9, 3, "8 save"), 1e6, 1e6) is None


Place = tuple[int, str]  # step and phase


def ticks(
    tmp_path: Path, monkeypatch, why: str | None, places: list[Place], workers: bool = False
) -> int | None:
    """Return the seconds that a rank asked to stop stays in the last of these (step, phase) pairs.

    It spends one second in each of the others. Return None if it does not end in 300 s.
    """
    clock, codes, passed = itertools.count(), list[int](), -len(places)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    dog = Watchdog(tmp_path, 0, 1, 1e3, codes.append, stop=lambda: why, workers=workers)

    def wait(seconds: float) -> bool:
        nonlocal passed
        passed += 1
        if passed <= 0:
            step, phase = places[passed - 1]
            dog.begin_step(step)
            dog.enter(phase)
        return passed > 300

    monkeypatch.setattr(dog._end, "wait", wait)
    monkeypatch.setattr(dog, "_say", lambda message: None)  # 300 s are milliseconds here
    dog._watch()
    return passed if codes else None


@contextmanager
def silence(seconds: float) -> Iterator[None]:
    """Simulate a request that has had no reply for this long."""
    with Tries("s3://bucket/rows.tar", 3600, None, random.Random(0)) as tries:
        tries.excuse(-seconds)
        yield


SAVING: list[Place] = [(3, "4 backbone")] + [(3, "8 save")] * 100
WAITING: Place = (4, WAIT_FOR_DATA)
PERSON, SCHEDULER = "signal SIGTERM", "signal SIGUSR1"


@pytest.mark.parametrize("why", [PERSON, SCHEDULER])
@pytest.mark.parametrize("silent", [0.0, 200.0])
@pytest.mark.parametrize("workers", [False, True])
def test_a_long_save_after_the_signal_is_no_wait_for_data(
    tmp_path, monkeypatch, why, silent, workers
):
    """The signal may come just after a step was announced; the next step begins after the save."""
    steps = [(step, phase) for step in range(4, 40) for phase in (WAIT_FOR_DATA, "4 backbone")]
    with silence(silent):
        stops = ticks(tmp_path, monkeypatch, why, [*SAVING, *steps], workers)
    assert stops is None


@pytest.mark.parametrize(
    ("why", "silent", "workers", "after"),
    [
        (PERSON, 200.0, False, 4),
        (SCHEDULER, 200.0, False, 60),
        (PERSON, 200.0, True, 4),
        (PERSON, 0.0, True, 30),  # this process does not see the workers' store
        (SCHEDULER, 0.0, True, 60),
        (SCHEDULER, 20.0, False, None),  # some seconds of 503s lose no steps
        (PERSON, 0.0, False, None),  # the store answers, or the delay is elsewhere
        (None, 200.0, True, None),
    ],
)
def test_how_long_data_are_waited_for_depends_on_who_asked(
    tmp_path, monkeypatch, why, silent, workers, after
):
    with silence(silent):
        assert ticks(tmp_path, monkeypatch, why, [*SAVING, WAITING], workers) == after


@pytest.mark.parametrize("why", [PERSON, SCHEDULER])
def test_before_the_first_step_there_is_nothing_to_save(tmp_path, monkeypatch, why):
    with silence(200.0):
        assert ticks(tmp_path, monkeypatch, why, [(0, "find the checkpoint")]) == 3
    assert ticks(tmp_path, monkeypatch, why, [(0, "build the model")], workers=True) is None
