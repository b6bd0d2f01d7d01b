"""Tests of failed saves: transient errors, user errors, and the recovery from them."""

import errno
import json
import os
import signal
import threading
import time

import pytest

from kimi_pretrain.checkpoint import storage_write
from kimi_pretrain.checkpoint.disk_write import staged_file
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable
from kimi_pretrain.checkpoint.ownership import OWNER, Owner
from kimi_pretrain.checkpoint.saver import CheckpointSaver, SaveProgress
from kimi_pretrain.checkpoint.storage_read import Place, open_place
from kimi_pretrain.checkpoint.writer_process import Replies, serve
from tests.unit.kimi_pretrain.checkpoint import ranks

MINE = Owner("mine", "s1")


def served(place: Place, **job) -> dict:
    """Run one job in an in-process writer and return its last reply."""
    come, go = os.pipe()
    with os.fdopen(come) as answers:
        serve([json.dumps({"id": 1, **job})], place, Replies(go))
        os.close(go)
        return json.loads(answers.read().splitlines()[-1])


@pytest.mark.parametrize(
    ("fault", "transient", "told"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), True, "Stale file handle"),
        (OSError(errno.EIO, "Input/output error"), True, "Input/output error"),
        (OSError(errno.ENOSPC, "No space left"), False, "No space left; free some space, or"),
        (OSError(errno.EDQUOT, "Quota exceeded"), False, "Quota exceeded; free some space, or"),
        (OSError(errno.EACCES, "Permission denied"), False, "Permission denied"),
        (KeyError("a bug"), False, "KeyError: 'a bug'"),
    ],
    ids=lambda value: str(value) if isinstance(value, Exception) else "",
)
def test_errors_of_a_shared_folder(tmp_path, monkeypatch, capfd, fault, transient, told):
    def fail(*_) -> None:
        raise fault

    monkeypatch.setattr(storage_write, "write_durably", fail)
    source = staged_file(b"tensors")
    files = [{"name": "rank_00000_000.safetensors", "fd": source.fd, "bytes": source.size}]
    answer = served(open_place(tmp_path), do="write", step=1, files=files)
    assert answer["transient"] is transient
    assert told in answer["failed"]
    if isinstance(fault, OSError):
        assert "step_00000001.partial/rank_00000_000.safetensors: " in answer["failed"]


def test_an_error_that_nobody_foresaw_passes_if_its_kind_does(tmp_path, monkeypatch, capfd):
    for fault in (TimeoutError(errno.ETIMEDOUT, "timed out"), RuntimeError("a bug")):

        def fail(*_, fault=fault) -> None:
            raise fault

        monkeypatch.setattr(storage_write.FolderWriter, "remove_torn", fail)
        answer = served(open_place(tmp_path), do="remove_torn", step=1)
        assert type(fault).__name__ in answer["failed"]
        assert answer["transient"] is isinstance(fault, OSError)


def save(place: Place, owner: Owner | None = None, *overrides: str) -> CheckpointSaver:
    """Start to save step 1 from one rank."""
    mesh = ranks.alone()
    saver = CheckpointSaver(place, ranks.config(*overrides), mesh, owner=owner)  # type: ignore
    saver.begin(ranks.tensors(1), ranks.state(1))
    return saver


def test_a_removal_that_is_given_up_leaves_a_hand_that_is_not_busy(tmp_path, monkeypatch):
    """The watchdogs of the other ranks allow half of `train.timeout_seconds` for a removal."""
    monkeypatch.setattr("kimi_pretrain.checkpoint.saver._REMOVAL_S", 1e6)
    saver = save(open_place(tmp_path), None, "train.timeout_seconds=1")
    writer = ranks.stop_before(saver, "retire", monkeypatch)
    saver.finish()
    assert writer.busy
    for _ in range(2):  # step 1 is already saved, so no new writer starts
        saver.begin(ranks.tensors(1), ranks.state(1))
        assert saver._writer is writer
        assert not writer.busy
        assert not writer.alive
        writer.poll()
        writer.close()
    assert writer.failed is not None
    saver.begin(ranks.tensors(2), ranks.state(2))
    assert saver._writer is not writer
    assert saver.finish() == str(tmp_path / "step_00000002")
    saver.close()


@pytest.mark.parametrize("hurry", [False, True])
def test_the_end_waits_for_the_last_removal_unless_in_a_hurry(tmp_path, monkeypatch, hurry):
    monkeypatch.setattr("kimi_pretrain.checkpoint.writer_client._PATIENCE_S", 0.2)
    place = open_place(tmp_path)
    saver = save(place, None, "checkpoint.keep_last=1")
    saver.begin(ranks.tensors(2), ranks.state(2))
    writer = ranks.stop_before(saver, "retire", monkeypatch)
    saver.finish()
    assert place.steps() == [1, 2]
    go_on = threading.Timer(1.0, lambda: os.kill(writer.pid, signal.SIGCONT))
    if not hurry:  # after far longer than _PATIENCE_S
        go_on.start()
    saver.close(hurry=hurry)
    assert not writer.alive
    assert place.folders() == [f"step_{n:08d}" for n in ((1, 2) if hurry else (2,))]


def test_what_was_written_is_told_once_and_again_if_it_was_not_heard(tmp_path):
    """A gather whose replies are dropped, as when the loop ends in between, loses nothing."""

    def work(mesh) -> list[list[int]]:
        saver = CheckpointSaver(open_place(tmp_path), ranks.config(), mesh)
        saver.begin(ranks.tensors(1), ranks.state(1))
        counts: list[list[int]] = []
        until, unheard = time.monotonic() + 60, 0
        while saver.under_way is not None:
            assert time.monotonic() < until
            if mesh.rank == 1 and not unheard:  # lets rank 0 finish writing first
                time.sleep(0.5)
            everyone: list[SaveProgress] = mesh.all_gather_object(saver.progress(0.05))
            counts.append([len(progress.files) for progress in everyone])
            if unheard == 0 and sum(counts[-1]):
                unheard = 1
                continue
            saver.advance(everyone)
        assert unheard
        saver.close()
        return counts

    counts, same = ranks.on_ranks(2, work)
    assert counts == same
    for rank in range(2):
        told = [count[rank] for count in counts if count[rank]]
        heard = told[1:] if told and [c for c in counts if sum(c)][0][rank] else told
        assert len(heard) == 1, counts
    found = open_place(tmp_path).checkpoint(1)
    assert found.verify() == []
    assert len(found.files) == 3


def test_a_checkpoint_is_completed_only_at_one_s_own_place(tmp_path):
    place = open_place(tmp_path)
    other = {"run": "1234", "run_dir": "/shared/runs/other", "host": "n7"}
    place.write_text(OWNER, json.dumps(other))
    saver = save(place, MINE)
    told = r"another run \(1234, run folder /shared/runs/other on n7\); choose another checkpoint"
    with pytest.raises(CheckpointError, match=told) as error:
        saver.finish()
    assert not isinstance(error.value, CheckpointUnavailable)  # a user error
    saver.close()
    assert place.steps() == []
    place.write_text(OWNER, "half a fi")
    assert "expected the id of a run" in commit(place, MINE)["failed"]
    (tmp_path / OWNER).write_bytes(b"\xff\xfe{")
    assert f"{tmp_path}/{OWNER} is " in commit(place, MINE)["failed"]
    # A copy of the run's folder claims the place from a host that cannot see the first one.
    place.write_text(OWNER, json.dumps({**MINE._asdict(), "start": "s2", "host": "far"}))
    told = commit(place, MINE)["failed"]
    assert "was taken by another start of this run (run folder unknown on far)" in told


def commit(place: Place, owner: Owner | None) -> dict:
    """Return a writer's reply to the commit of an empty save."""
    return served(place, do="commit", step=1, manifest="{}", files=[], owner=owner)


@pytest.mark.parametrize(("named", "owner"), [(MINE, MINE), (None, MINE), (MINE, None)])
def test_the_owner_s_commits_pass_and_those_where_none_is_named(tmp_path, named, owner):
    place = open_place(tmp_path)
    (tmp_path / "step_00000001.partial").mkdir()
    if named is not None:
        place.write_text(OWNER, json.dumps(named._asdict()))
    assert commit(place, owner)["done"] == str(tmp_path / "step_00000001")


def test_an_owner_who_cannot_be_read_is_no_owner_who_left(tmp_path, monkeypatch):
    def fail(*_) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    place = open_place(tmp_path)
    monkeypatch.setattr(Place, "read_text", fail)
    answer = commit(place, MINE)
    assert answer["transient"]
    assert "owner.json: Stale file handle" in answer["failed"]


def test_writers_that_are_killed_are_worth_a_restart(tmp_path):
    """The node's OOM killer may kill the writer in every save."""
    saver = save(open_place(tmp_path), None, "checkpoint.failures=2")
    for step in (1, 2):
        if step > 1:
            saver.begin(ranks.tensors(step), ranks.state(step))
        writer = saver._writer
        assert writer is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer._process.wait()
        writer.done = None  # in case it finished before the kill
        with pytest.raises(CheckpointUnavailable, match="was killed by signal 9") as error:
            saver.finish()
    assert "checkpoint.failures=2" in str(error.value)
    saver.close()
