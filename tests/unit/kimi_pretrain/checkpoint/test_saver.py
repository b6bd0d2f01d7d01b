"""Tests of background saves by several ranks; ranks are threads, writers are real processes."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.hashes import hash_tensor
from kimi_pretrain.checkpoint.load import load
from kimi_pretrain.checkpoint.saver import CheckpointSaver
from kimi_pretrain.checkpoint.staging import StagingBuffers
from kimi_pretrain.checkpoint.storage_read import open_checkpoint, open_place
from moonvit3d.safetensors_io import torch_dtypes
from tests import ROOT
from tests.unit.kimi_pretrain.checkpoint import ranks


def checkpoints(folder, mesh, *overrides: str) -> CheckpointSaver:
    return CheckpointSaver(open_place(folder), ranks.config(*overrides), mesh)


def every_type(rank: int) -> dict[str, torch.Tensor]:
    """Return one rank's tensors of every dtype; three ranks, two, or one hold each of them."""
    draw = torch.Generator().manual_seed(7)
    shared = {
        f"both.{name}": torch.randint(0, 2, (3, size), generator=draw).to(dtype)
        for size, (name, dtype) in enumerate(torch_dtypes().items())
    }
    shared |= {"scalar": torch.tensor(4), "turned": torch.randn(5, 4, generator=draw).t()}
    pair = {f"pair.{n}": torch.randn(9, n, generator=draw) for n in range(4)}
    own = {f"optim.{rank}.{n}": torch.full((n + 1, 300), rank + n / 8) for n in range(3)}
    return shared | own | (pair if rank else {})


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path):
    def work(mesh):
        saver = checkpoints(tmp_path, mesh, "checkpoint.file_mib=1")
        held = every_type(mesh.rank)
        saver.begin(held, ranks.state(3))
        uri = saver.finish()
        saver.close()
        return uri

    (uri, *others) = ranks.on_ranks(3, work)
    assert others == [uri, uri]
    found = open_checkpoint(uri)
    assert found.verify() == []
    assert found.manifest().state == ranks.state(3)
    everything = {name for rank in range(3) for name in every_type(rank)}
    assert set(found.weight_map()) == everything
    written = [name for file in found.files if file != "index.json" for name in found.header(file)]
    assert sorted(written) == sorted(everything)  # each of them once
    for rank in range(3):
        wanted = every_type(rank)
        loaded = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
        assert load(found, loaded) == ranks.state(3)
        for name, tensor in wanted.items():
            assert hash_tensor(loaded[name]) == hash_tensor(tensor), name


def test_torch_s_own_reader_reads_it(tmp_path):
    ranks.save(tmp_path, 5)
    found = {name: torch.zeros_like(tensor) for name, tensor in ranks.tensors(5).items()}
    reader = HuggingFaceStorageReader(str(tmp_path / "step_00000005"))
    load_by_torch(found, storage_reader=reader)
    for name, tensor in ranks.tensors(5).items():
        assert torch.equal(found[name], tensor), name


def test_tensors_may_change_while_they_are_written(tmp_path):
    saver = checkpoints(tmp_path, ranks.alone())
    held = ranks.tensors(1, 20_000)
    saver.begin(held, ranks.state(1, 1))
    for tensor in held.values():
        tensor.zero_()
    assert saver.under_way == 1
    saver.finish()
    saver.close()
    found = open_place(tmp_path).checkpoint(1)
    for name, tensor in ranks.tensors(1, 20_000).items():
        assert torch.equal(found.tensor(name), tensor), name
    assert set(saver.seconds) == {"stall", "background"}


def test_what_is_still_is_copied_while_training_goes_on(tmp_path, monkeypatch):
    """The copy is held up until training asks for its end; nothing waits for it earlier."""
    may_go_on, copy = threading.Event(), StagingBuffers.copy
    ends_with_process = list[bool]()

    def slow(aside, tensors, which):
        if threading.current_thread() is not threading.main_thread():
            ends_with_process.append(threading.current_thread().daemon)
            assert may_go_on.wait(30)
        copy(aside, tensors, which)

    monkeypatch.setattr(StagingBuffers, "copy", slow)
    saver = checkpoints(tmp_path, ranks.alone())
    held = {"early": torch.zeros(1000), "late": torch.zeros(1000)}
    saver.begin(held, ranks.state(1), lambda name: name == "late")
    held["early"].fill_(1)  # allowed immediately
    held["late"].fill_(2)  # not allowed; the saved value shows when it was copied
    may_go_on.set()
    saver.wait_staged()
    assert ends_with_process == [True]
    assert not saver.is_staging
    held["late"].fill_(3)
    uri = saver.finish()
    saver.close()
    found = open_checkpoint(uri)
    assert found.tensor("early").unique().tolist() == [0]
    assert found.tensor("late").unique().tolist() == [2]
    assert found.verify() == []


def test_a_copy_that_fails_is_told(tmp_path, monkeypatch):
    def fail(aside, tensors, which):
        if which("late"):
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(StagingBuffers, "copy", fail)
    saver = checkpoints(tmp_path, ranks.alone())
    saver.begin({"late": torch.zeros(3)}, ranks.state(1), lambda name: True)
    with pytest.raises(RuntimeError, match="the device is gone"):
        saver.wait_staged()


def test_the_loop_brings_a_save_to_its_end(tmp_path):
    """Works as in the training loop, with one gather a step and no other collective."""

    def work(mesh):
        saver = checkpoints(tmp_path, mesh)
        saver.begin(ranks.tensors(2), ranks.state(2))
        done, steps = None, 0
        while done is None:
            done = saver.advance(mesh.all_gather_object(saver.progress()))
            assert saver.under_way == (None if done else 2)
            steps += 1
            time.sleep(0.01)
        assert saver.advance(mesh.all_gather_object(saver.progress())) is None
        saver.close()
        return done, steps

    answers = ranks.on_ranks(2, work)
    assert answers[0] == answers[1]
    assert answers[0][0] == str(tmp_path / "step_00000002")
    assert open_place(tmp_path).steps() == [2]


def test_old_ones_are_removed_and_a_later_course_is_set_aside(tmp_path, caplog):
    keep = ("checkpoint.keep_last=2", "checkpoint.keep_every=4")
    ranks.save(tmp_path, 1, 2, 3, 4, 5, 6, 7, overrides=keep)
    place = open_place(tmp_path)
    assert place.steps() == [4, 6, 7]
    ranks.save(tmp_path, 5, overrides=keep)  # by a run that resumed from step 4
    assert place.steps() == [4, 5]
    left = [tmp_path / f"step_0000000{n}.abandoned_1" for n in (6, 7)]
    assert sorted(tmp_path.iterdir()) == [*(tmp_path / f"step_0000000{n}" for n in (4, 5)), *left]
    assert (
        f"step 7 is of an abandoned course of this run: latest will not take it (kept as {left[1]}"
        in (  # noqa: E501
            caplog.text
        )
    )
    before = [(folder / "manifest.json").read_bytes() for folder in left]
    ranks.save(tmp_path, 6, 7, overrides=keep)  # reaches the steps that were set aside
    assert place.steps() == [4, 6, 7]
    assert place.checkpoint(7).verify() == []
    # These are unchanged and can be resumed from, and so can those of a second abandoned lineage.
    assert [(folder / "manifest.json").read_bytes() for folder in left] == before
    assert open_checkpoint(left[1]).verify() == []
    ranks.save(tmp_path, 5, overrides=keep)
    assert (tmp_path / "step_00000007.abandoned_2" / "manifest.json").is_file()
    # Earlier versions set a checkpoint aside by renaming its manifest; its folder moves as well.
    old = tmp_path / "step_00000006"
    ranks.save(tmp_path, 6, overrides=keep)
    (old / "manifest.json").rename(old / "manifest.abandoned.json")
    ranks.save(tmp_path, 6, overrides=keep)
    assert (tmp_path / "step_00000006.abandoned_3" / "manifest.abandoned.json").is_file()
    assert place.checkpoint(6).verify() == []


def test_what_is_saved_already_is_not_saved_again(tmp_path):
    saver = checkpoints(tmp_path, ranks.alone())
    saver.begin(ranks.tensors(1), ranks.state(1, 1))
    saver.begin(ranks.tensors(1), ranks.state(1, 1))  # a stop right after a periodic save
    assert saver.under_way is None
    before = (tmp_path / "step_00000001").stat().st_ino
    assert saver.finish() == str(tmp_path / "step_00000001")
    assert (tmp_path / "step_00000001").stat().st_ino == before
    saver.begin(ranks.tensors(2), ranks.state(1, 2))  # another state of the same step replaces it
    saver.finish()
    saver.close()
    found = open_place(tmp_path).checkpoint(1)
    assert found.manifest().state == ranks.state(1, 2)
    assert found.verify() == []
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def kill_writer(saver: CheckpointSaver, number: int) -> None:
    assert saver._writer is not None
    ranks.strike(saver._writer.pid, number)


def test_a_killed_writer_fails_the_save_on_all_ranks_and_training_goes_on(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("kimi_pretrain.checkpoint.saver._SOON_S", 50.0)
    told: list[str] = []

    def work(mesh):
        saver = checkpoints(tmp_path, mesh, "checkpoint.failures=2")
        saver.begin(ranks.tensors(1), ranks.state(1))
        saver.finish()
        if mesh.rank == 1:
            kill_writer(saver, signal.SIGSTOP)
        saver.begin(ranks.tensors(2), ranks.state(2))
        if mesh.rank == 1:
            kill_writer(saver, signal.SIGKILL)
        with pytest.raises(CheckpointError, match="rank 1: .* was killed by signal 9") as error:
            saver.finish()
        told.append(str(error.value))
        assert not (tmp_path / "step_00000002.partial").exists() or mesh.rank
        saver.begin(ranks.tensors(3), ranks.state(3))  # with a new writer
        saver.finish()
        saver.close()

    ranks.on_ranks(2, work)
    assert told[0] == told[1]
    assert open_place(tmp_path).steps() == [1, 3]
    assert open_place(tmp_path).checkpoint(3).verify() == []
    assert not list(tmp_path.glob("*.partial"))
    assert "training goes on" in caplog.text


def test_too_many_failures_in_a_row_stop_the_run(tmp_path):
    saver = checkpoints(tmp_path, ranks.alone(), "checkpoint.failures=2")

    def fail(step: int) -> None:
        (tmp_path / f"step_{step:08d}.partial").write_text("in the way")
        saver.begin(ranks.tensors(step), ranks.state(step))
        while saver.under_way:
            saver.advance([saver.progress(0.1)])

    fail(1)
    with pytest.raises(CheckpointError, match=r"save 2 in a row.*checkpoint\.failures=2"):
        fail(2)
    saver.close()


def fail_and_try_again(tmp_path, monkeypatch, meanwhile) -> CheckpointSaver:
    """Make a save of step 1 fail, stop the process that removes its leftovers, and save again."""
    monkeypatch.setattr("kimi_pretrain.checkpoint.saver._SOON_S", 0.0)
    monkeypatch.setattr("kimi_pretrain.checkpoint.writer_client._PATIENCE_S", 0.2)
    saver = checkpoints(tmp_path, ranks.alone(), "checkpoint.failures=2")
    saver.prepare(ranks.tensors(1))
    writer = saver._writer
    assert writer is not None
    (tmp_path / "step_00000001.partial").write_text("in the way")
    saver.begin(ranks.tensors(1), ranks.state(1))
    ranks.stop_before(saver, "remove_torn", monkeypatch)
    with pytest.raises(CheckpointError, match="step 1 could not be written"):
        saver.finish()
    assert writer.busy
    (tmp_path / "step_00000001.partial").unlink()
    meanwhile(writer)
    saver.begin(ranks.tensors(1), ranks.state(1))
    assert saver.finish() == str(tmp_path / "step_00000001")
    assert open_place(tmp_path).checkpoint(1).verify() == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000001"]
    return saver


def test_a_step_is_saved_again_when_its_leftovers_are_removed(tmp_path, monkeypatch):
    """Otherwise the removal would delete the new files."""

    def go_on(writer) -> None:
        threading.Timer(0.5, writer._process.send_signal, [signal.SIGCONT]).start()

    fail_and_try_again(tmp_path, monkeypatch, go_on).close()


def test_a_removal_that_never_ends_is_given_up_with_its_process(tmp_path, monkeypatch):
    stopped = []

    def lose_patience(writer) -> None:  # set only now: a slow machine's first save would exceed it
        stopped.append(writer)
        monkeypatch.setattr("kimi_pretrain.checkpoint.saver._REMOVAL_S", 0.3)

    saver = fail_and_try_again(tmp_path, monkeypatch, lose_patience)
    assert saver._writer is not None
    assert saver._writer.pid != stopped[0].pid
    assert not stopped[0].alive
    saver.close()


def test_nothing_is_complete_before_all_have_written(tmp_path):
    def work(mesh):
        saver = checkpoints(tmp_path, mesh)
        saver.prepare(ranks.tensors(1))
        if mesh.rank == 1:
            kill_writer(saver, signal.SIGSTOP)
        saver.begin(ranks.tensors(1), ranks.state(1))
        since = None
        while since is None or time.monotonic() < since + 0.2:
            everyone = mesh.all_gather_object(saver.progress(0.01))
            assert saver.advance(everyone) is None
            assert everyone[1].phase == "writing"
            if since is None and everyone[0].phase == "written":
                since = time.monotonic()
            since = mesh.all_gather_object(since)[0]
        assert open_place(tmp_path).steps() == []
        if mesh.rank == 1:
            kill_writer(saver, signal.SIGCONT)
        saver.finish()
        saver.close()

    ranks.on_ranks(2, work)
    assert open_place(tmp_path).checkpoint(1).verify() == []


def test_a_full_disk_fails_the_save_and_leaves_no_rubbish(tmp_path, caplog):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can be mounted by root alone")
    try:
        saver = checkpoints(disk, ranks.alone())
        saver.begin(ranks.tensors(1), ranks.state(1))
        assert saver.finish() == str(disk / "step_00000001")
        saver.begin(ranks.tensors(2, 40_000), ranks.state(2))
        with pytest.raises(CheckpointError, match="No space left on device; free some space"):
            saver.finish()
        saver.close()
        assert [p.name for p in disk.iterdir()] == ["step_00000001"]
        assert open_place(disk).checkpoint(1).verify() == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_file_that_may_not_grow_fails_the_save(tmp_path):
    """Works without root: the writer may write 100 kB to a file."""
    saver = checkpoints(tmp_path, ranks.alone())
    saver.prepare(ranks.tensors(1, 2000))
    assert saver._writer is not None
    resource.prlimit(saver._writer.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    saver.begin(ranks.tensors(1, 2000), ranks.state(1))
    with pytest.raises(CheckpointError, match=r"rank_00000_000.safetensors: File too large"):
        saver.finish()
    saver.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(240)
def test_a_writer_is_shielded_from_the_job_s_signals_and_dies_with_its_rank(tmp_path):
    script = f"""
import os, signal, sys, time
from tests.unit.kimi_pretrain.checkpoint import ranks
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.checkpoint.saver import CheckpointSaver
saver = CheckpointSaver(open_place({str(tmp_path)!r}), ranks.config(), ranks.alone())
saver.prepare(ranks.tensors(1))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    os.kill(saver._writer.pid, number)
saver.begin(ranks.tensors(1), ranks.state(1))
saver.finish()
os.kill(saver._writer.pid, signal.SIGSTOP)  # so it does not hear that stdin is closed
print(saver._writer.pid, flush=True)
time.sleep(600)
"""
    rank = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    assert open_place(tmp_path).steps() == [1]
    assert Path(f"/proc/{pid}").exists()
    rank.kill()
    rank.wait()
    until = time.monotonic() + 50
    with suppress(FileNotFoundError, ProcessLookupError):  # missing once gone, empty for a zombie
        while Path(f"/proc/{pid}/cmdline").read_bytes():
            assert time.monotonic() < until, "the writer outlives its rank"
            time.sleep(0.05)


def test_a_rank_may_have_thousands_of_open_files(tmp_path):
    """Rank 0 holds a connection to every rank, so its writer's replies use high descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 1500:
        pytest.skip(f"this process may open {limits[1]} files at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        saver = checkpoints(tmp_path, ranks.alone())
        saver.begin(ranks.tensors(1), ranks.state(1))
        uri = saver.finish()
        saver.close()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_checkpoint(uri).verify() == []


def test_the_writer_does_not_load_torch():
    check = (
        "import sys, kimi_pretrain.checkpoint.writer_process; "
        "sys.exit(str([m for m in ('torch', 'numpy', 'boto3') if m in sys.modules] or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == ""


def test_other_tensors_are_planned_anew(tmp_path):
    saver = checkpoints(tmp_path, ranks.alone())
    saver.begin(ranks.tensors(1), ranks.state(1))
    larger = ranks.tensors(2, 80)
    saver.begin(larger, ranks.state(2))
    saver.finish()
    saver.close()
    for name, tensor in larger.items():
        assert torch.equal(open_place(tmp_path).checkpoint(2).tensor(name), tensor)


def test_memory_is_no_place_for_a_run():
    with pytest.raises(ValueError, match="checkpoint.place=memory://x"):
        checkpoints("memory://x", ranks.alone())


def test_without_memory_for_all_files_the_first_are_given_back():
    tensors = {name: torch.zeros(300) for name in "ab"}
    with pytest.MonkeyPatch.context() as patch:
        reserve, opened = os.posix_fallocate, []

        def full(fd, offset, size):
            opened.append(fd)
            if len(opened) == 2:
                raise OSError(errno.ENOMEM, "no memory")
            reserve(fd, offset, size)

        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CheckpointError, match="no memory to copy"):
            StagingBuffers({"1": ["a"], "2": ["b"]}, tensors, {}, torch.device("cpu"))
    assert len(opened) == 2
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


PRINTS = """
import os, sys
from kimi_pretrain.checkpoint import writer_process as w
def served(lines, place, reply):
    print("a library prints", flush=True)
    os.write(1, b"and another writes")
    reply.send(done=next(iter(lines)).strip())
w.serve = served
sys.argv = ["writer", str(os.getppid()), sys.argv[1], "1"]
w.main()
"""


def test_what_libraries_print_in_a_writer_does_not_mix_with_its_replies(tmp_path):
    command = [sys.executable, "-c", PRINTS, str(tmp_path / "place")]
    done = subprocess.run(command, input="job\n", capture_output=True, text=True, timeout=100)
    assert [json.loads(line)["done"] for line in done.stdout.splitlines()] == ["job"], done.stderr
    assert "a library prints" in done.stderr
    assert "and another writes" in done.stderr
