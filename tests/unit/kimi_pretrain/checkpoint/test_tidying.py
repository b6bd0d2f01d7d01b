"""Tests that leftovers of killed runs are removed during new saves, which lose no file."""

import json
import os
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from kimi_pretrain.checkpoint import storage_write
from kimi_pretrain.checkpoint.disk_write import staged_file
from kimi_pretrain.checkpoint.ownership import OWNER
from kimi_pretrain.checkpoint.saver import CheckpointSaver
from kimi_pretrain.checkpoint.storage_read import Place, open_place
from kimi_pretrain.checkpoint.storage_write import ProtectedSteps, open_storage_writer
from kimi_pretrain.checkpoint.writer_client import WriterClient
from kimi_pretrain.checkpoint.writer_process import Replies, WriterProcess
from tests.unit.kimi_pretrain.checkpoint import ranks

FILES = ("index.json", "rank_00000_000.safetensors", "rank_00001_000.safetensors")


@contextmanager
def writer_of(place: Place):
    """Yield an in-process writer and a function that returns its replies so far."""
    come, go = os.pipe()
    os.set_blocking(come, False)

    def answers() -> list[dict]:
        try:
            return [json.loads(line) for line in os.read(come, 1 << 20).splitlines()]
        except BlockingIOError:
            return []

    try:
        yield WriterProcess(place, Replies(go)), answers
    finally:
        os.close(come)
        os.close(go)


def write_job(step: int) -> dict:
    source = staged_file(b"tensors")
    file = {"name": FILES[1], "fd": source.fd, "bytes": source.size}
    return {"do": "write", "step": step, "files": [file]}


def fill(place: Place, folder: str, *names: str) -> None:
    for name in names:
        if place.folder is None:
            place.store.put(f"{folder}/{name}", b"{}")
        else:
            (place.folder / folder).mkdir(exist_ok=True)
            (place.folder / folder / name).write_bytes(b"{}")


@pytest.fixture(params=["folder", "store"])
def place(request, tmp_path):
    uri = str(tmp_path) if request.param == "folder" else f"memory://{request.node.originalname}"
    found = open_place(uri)
    yield found
    if found.folder is None:
        found.store.clear()  # type: ignore[attr-defined]


def torn(place: Place, step: int) -> str:
    """Return the folder that holds the files of an unfinished save."""
    return f"step_{step:08d}" + (".partial" if place.folder is not None else "")


def test_what_is_torn_goes_and_what_is_protected_stays(place):
    for step in (1, 2, 3):
        fill(place, torn(place, step), *FILES)
    fill(place, "step_00000004", *FILES, "manifest.json")
    fill(place, "step_00000005", *FILES, "manifest.abandoned.json")
    fill(place, "step_by_step.partial", "mine")
    steps = ProtectedSteps()
    steps.protect(2)
    open_storage_writer(place).tidy(steps)
    assert place.folders() == sorted(
        [torn(place, 2), "step_00000004", "step_00000005", "step_by_step.partial"]
    )
    if place.folder is None:
        kept = [f"step_00000004/{name}" for name in sorted((*FILES, "manifest.json"))]
        assert place.store.list("step_00000004/") == kept


def test_a_removal_that_was_cut_off_is_ended_by_the_next_run(place, monkeypatch):
    """The removal of an old checkpoint is killed halfway, when its manifest is already gone."""
    fill(place, "step_00000001", *FILES, "manifest.json")
    fill(place, "step_00000002", *FILES, "manifest.json")

    class Killed(Exception):
        pass

    def half(*_, **__) -> None:
        if place.folder is None:
            plain_delete(f"step_00000001/{FILES[1]}")
        else:
            (place.folder / "step_00000001.leaving" / FILES[1]).unlink()
        raise Killed

    storage = open_storage_writer(place)
    if place.folder is None:
        plain_delete = place.store.delete
        monkeypatch.setattr(storage, "remove_torn", half)
    else:
        plain = shutil.rmtree
        # The first call removes the leftovers of an earlier removal.
        monkeypatch.setattr(
            storage_write.shutil, "rmtree", lambda *a, **k: plain(*a, **k) if k else half()
        )
    with pytest.raises(Killed):
        storage.remove(1)
    monkeypatch.undo()
    assert place.steps() == [2]
    assert len(place.folders()) == 2
    open_storage_writer(place).tidy(ProtectedSteps())
    assert place.folders() == ["step_00000002"]


def test_an_interrupted_replacement_is_undone(tmp_path):
    place = open_place(tmp_path)
    fill(place, "step_00000001.replaced", *FILES, "manifest.json")
    fill(place, "step_00000002.replaced", *FILES, "manifest.json")
    fill(place, "step_00000002", *FILES, "manifest.json")
    open_storage_writer(place).tidy(ProtectedSteps())
    assert place.folders() == ["step_00000001", "step_00000002"]


def test_a_step_is_protected_only_when_nothing_of_it_is_being_removed():
    steps, protected = ProtectedSteps(), threading.Event()

    def protect() -> None:
        steps.protect(1)
        protected.set()

    other = threading.Thread(target=protect)
    with steps.removing(1) as free:
        assert free
        steps.protect(2)  # another step is protected immediately
        other.start()
        assert not protected.wait(0.2)
    assert protected.wait(60)
    other.join()
    for step in (1, 2):
        assert steps.is_protected(step)
        with steps.removing(step) as free:
            assert not free


def test_tidying_holds_up_no_save(tmp_path, monkeypatch):
    """A save is written and completed while tidying is blocked in a removal."""
    place, may_go_on, reached = open_place(tmp_path), threading.Event(), threading.Event()
    fill(place, "step_00000007.partial", *FILES)
    fill(place, "step_00000008.partial", *FILES)
    plain = shutil.rmtree

    def slow(path: Path, **more) -> None:
        if Path(path).name.startswith("step_00000007"):
            reached.set()
            assert may_go_on.wait(60)
        plain(path, **more)

    monkeypatch.setattr(storage_write.shutil, "rmtree", slow)
    with writer_of(place) as (writer, answers):
        writer.do({"do": "tidy", "owner": None})
        assert reached.wait(60)
        written = writer.do(write_job(8))
        assert list(written) == [FILES[1]]
        commit = {"do": "commit", "step": 8, "manifest": "{}", "files": [*written], "owner": None}
        assert writer.do(commit) == str(tmp_path / "step_00000008")
        assert place.folders() == ["step_00000007.partial", "step_00000008"]
        assert not any("tidied" in answer for answer in answers())
        may_go_on.set()
        until = threading.Event()
        for _ in range(600):
            if any("tidied" in answer for answer in answers()):
                break
            until.wait(0.1)
        else:
            pytest.fail("tidying does not end")
    assert place.folders() == ["step_00000008"]
    files = sorted(entry.name for entry in (tmp_path / "step_00000008").iterdir())
    assert files == ["manifest.json", FILES[1]]  # no file of the torn save is left


def test_nothing_is_tidied_at_another_run_s_place(tmp_path):
    place = open_place(tmp_path)
    place.write_text(OWNER, '{"run": "other"}')
    fill(place, "step_00000007.partial", *FILES)  # its unfinished save
    with writer_of(place) as (writer, answers):
        writer._tidy(("mine", "s1"))
        written, end = answers()
    assert "tidying up failed" in written["warning"]
    assert "checkpoints of another run (other" in written["warning"]
    assert end["tidied"]
    assert place.folders() == ["step_00000007.partial"]


def test_a_run_tidies_up_before_its_first_save(tmp_path):
    """Tidying begins when the run starts; the end of the run waits for it."""
    place = open_place(tmp_path)
    fill(place, "step_00000007.partial", *FILES)
    saver = CheckpointSaver(place, ranks.config(), ranks.alone())  # type: ignore[arg-type]
    saver.prepare(ranks.tensors(1))
    assert saver._writer is not None
    assert saver._writer.tidying
    saver.close()
    assert place.folders() == []


def test_a_step_that_is_saved_while_its_place_is_tidied_is_whole(tmp_path):
    """Two ranks save during tidying; neither loses a file, whichever comes first."""
    place = open_place(tmp_path)
    for step in range(1, 40):
        fill(place, f"step_{step:08d}.partial", *FILES)

    def work(mesh) -> None:
        saver = CheckpointSaver(open_place(tmp_path), ranks.config(), mesh)
        saver.begin(ranks.tensors(39), ranks.state(39))  # the step that is tidied last
        saver.finish()
        saver.begin(ranks.tensors(40), ranks.state(40))
        saver.finish()
        saver.close()

    ranks.on_ranks(2, work)
    assert place.folders() == ["step_00000039", "step_00000040"]
    for step in (39, 40):
        assert place.checkpoint(step).verify() == []


def test_a_step_is_protected_before_any_rank_begins_with_it(tmp_path, monkeypatch):
    """A new writer learns the step before it tidies; a tidying writer agrees before the gather."""
    sent: list[tuple[str, int | None]] = []
    plain = WriterClient.send

    def send(writer: WriterClient, do: str, **values) -> None:
        sent.append((do, values.get("step")))
        plain(writer, do, **values)

    class Mesh(ranks.Mesh):
        def all_gather_object(self, value: object) -> list[object]:
            # After the gather, other ranks may start to write, with a new writer after `prepare`.
            sent.append(("gather", None))
            writer = saver._writer
            assert writer is None or not (writer.busy and writer._job_kind == "protect")
            return super().all_gather_object(value)

    monkeypatch.setattr(WriterClient, "send", send)
    mesh = Mesh(0, ranks.Threads(1))
    saver = CheckpointSaver(open_place(tmp_path), ranks.config(), mesh)  # type: ignore[arg-type]
    saver.begin(ranks.tensors(5), ranks.state(5))  # starts a writer
    jobs = [job for job in sent if job[0] != "gather"]
    assert jobs == [("protect", 5), ("tidy", None), ("write", 5)]
    saver.finish()
    writer = saver._writer
    assert writer is not None
    until = time.monotonic() + 60
    while writer.tidying or writer.busy:
        assert time.monotonic() < until
        writer.poll(0.1)
    writer.tidying = True  # pretends that tidying takes long
    sent.clear()
    saver.begin(ranks.tensors(6), ranks.state(6))
    assert sent == [("protect", 6), ("gather", None), ("write", 6)]
    writer.tidying = False
    saver.finish()
    saver.close()


def test_of_what_a_lost_commit_may_have_completed_the_manifest_goes_first(monkeypatch):
    """Otherwise a process that is killed in between would leave a manifest without its files."""
    place = open_place("memory://lost_commit/place")
    for name in (*FILES, "manifest.json"):
        place.store.put(f"step_00000004/{name}", b"x")
    gone, plain = [], place.store.delete
    monkeypatch.setattr(place.store, "delete", lambda key: gone.append(key) or plain(key))
    open_storage_writer(place).remove_torn(4)
    assert gone[0] == "step_00000004/manifest.json"
    assert place.store.list() == []
