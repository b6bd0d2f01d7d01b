"""Tests that a start without checkpoints reads its run folder and never discards its history."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kimi_pretrain.checkpoint.ownership import Owner
from kimi_pretrain.checkpoint.scheduler import CheckpointScheduler
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.config import load_config
from kimi_pretrain.reliability.run_history import (
    check_fresh,
    check_may_begin,
    check_place,
    check_unused,
    check_way_back,
    last_own_step,
    latest_in,
    note_place,
    noted_place,
    where,
)
from kimi_pretrain.reliability.run_lock import claim, run_id
from kimi_pretrain.reliability.status import Status, write_status
from launch.cli.main import app


@pytest.fixture
def run_dir(tmp_path):
    """Return the folder of a run that has a metrics line and no checkpoint yet."""
    folder = tmp_path / "run"
    folder.mkdir()
    run_id(folder)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    return folder


def saved(place: Path, step: int) -> None:
    folder = place / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


def refused(*arguments: str) -> str:
    """Return the refusal that `train` prints before any process starts or torch is loaded."""
    result = CliRunner().invoke(app, ["train", "--config", "tiny_cpu", *arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_latest_of_a_folder_without_a_run_is_a_misspelt_folder(tmp_path):
    told = refused("--run-dir", str(tmp_path / "rnu"), "--resume", "latest")
    assert f"there is no checkpoint in {tmp_path}/rnu/checkpoints" in told
    assert f"{tmp_path}/rnu holds no run; is --run-dir right?" in told
    assert "--or-start" in told
    assert not (tmp_path / "rnu").exists()
    check_may_begin(tmp_path / "rnu", open_place(tmp_path / "none"), True)
    assert "--or-start" in refused("--run-dir", str(tmp_path / "rnu"), "--or-start")


def test_latest_does_not_begin_again_beside_a_history(run_dir, tmp_path):
    lines = (run_dir / "metrics.jsonl").read_text()
    elsewhere = f"checkpoint.place={tmp_path}/b"
    told = refused("--run-dir", str(run_dir), "--resume", "latest", elsewhere)
    assert f"there is no checkpoint in {tmp_path}/b, but {run_dir}/metrics.jsonl holds" in told
    # A batch script or torchrun may restart after a kill before the first save.
    check_may_begin(run_dir, open_place(tmp_path / "b"), True)
    write_status(run_dir, Status("running", 4, 9, checkpoint="/a/step_00000004"))
    for begin in ((), ("--or-start",)):  # after a save no restart begins from scratch
        told = refused("--run-dir", str(run_dir), "--resume", "latest", *begin, elsewhere)
        assert f"{run_dir}/status.json names /a/step_00000004; set checkpoint.place as" in told
    assert (run_dir / "metrics.jsonl").read_text() == lines


def test_another_place_than_the_run_s_is_refused_by_both_names(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = open_place("saved")  # relative to the current working folder
    claim(mine, run_dir)
    note_place(run_dir, mine)
    saved(tmp_path / "saved", 3)
    saved(tmp_path / "other" / "saved", 2)  # an older copy
    check_place(run_dir, mine)
    check_place(run_dir, open_place(f"file://{tmp_path}/saved/"))
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    check_place(run_dir, open_place(tmp_path / "link"))
    monkeypatch.chdir(tmp_path / "other")
    told = refused("--run-dir", str(run_dir), "--resume", "latest", "checkpoint.place=saved")
    assert (
        f"saves to {tmp_path}/saved (run.json), but checkpoint.place is {tmp_path}/other/" in told
    )
    assert f"--resume {tmp_path}/saved/step_" in told
    with pytest.raises(ValueError, match=r"checkpoint.place is s3://b/run now"):
        check_place(run_dir, open_place("s3://b/run"))
    (run_dir / "metrics.jsonl").write_text("")  # no step was done
    check_place(run_dir, open_place("s3://b/run"))
    note_place(run_dir, open_place("s3://b/run/"))
    assert noted_place(run_dir) == where(open_place("s3://b/run")) == "s3://b/run"
    assert json.loads((run_dir / "run.json").read_text())["id"] == run_id(run_dir)


def test_a_place_inside_the_run_folder_goes_where_the_folder_goes(run_dir, tmp_path, monkeypatch):
    note_place(run_dir, open_place(run_dir / "checkpoints"))
    check_place(run_dir, open_place(run_dir / "checkpoints"))
    os.rename(run_dir, tmp_path / "moved")
    check_place(tmp_path / "moved", open_place(tmp_path / "moved" / "checkpoints"))
    monkeypatch.chdir(tmp_path)
    check_place(Path("moved"), open_place(Path("moved") / "checkpoints"))
    with pytest.raises(ValueError, match="checkpoint.place is /elsewhere now"):
        check_place(tmp_path / "moved", open_place("/elsewhere"))


def test_a_run_of_an_earlier_version_says_nothing_of_its_place(run_dir):
    assert noted_place(run_dir) is None
    check_place(run_dir, open_place("s3://b/run"))
    shutil.rmtree(run_dir)
    assert noted_place(run_dir) is None


def test_a_folder_is_fresh_until_a_run_has_written_into_it(tmp_path):
    check_fresh(tmp_path / "none")
    (tmp_path / "run.json").touch()
    check_fresh(tmp_path)
    folder = tmp_path / "checkpoints" / "step_00000003"
    folder.mkdir(parents=True)
    check_fresh(tmp_path)  # an incomplete save without a manifest
    (folder / "manifest.json").touch()
    with pytest.raises(ValueError, match="holds an earlier run"):
        check_fresh(tmp_path)


def test_nothing_begins_from_scratch_at_a_place_with_checkpoints(tmp_path):
    """If only the run folder's lines are gone, all checkpoints would be set aside as abandoned."""
    check_unused(open_place(tmp_path / "place"))
    saved(tmp_path / "place", 7)
    with pytest.raises(ValueError, match=r"place holds checkpoints, .* of step 7; go"):
        check_unused(open_place(tmp_path / "place"))


def test_a_course_in_a_store_is_not_left_to_be_written_over(tmp_path):
    """Folders keep old checkpoints under another name; objects in a store cannot be renamed."""
    place = open_place("memory://history/run")
    for step in (2, 4, 6):
        place.store.put(f"step_{step:08d}/manifest.json", b"{}")
        saved(tmp_path, step)
    check_way_back(place, 6)
    check_way_back(open_place(tmp_path), 2)
    with pytest.raises(ValueError, match=r"memory://history/run holds .*another .*steps 4 to 6"):
        check_way_back(place, 2)
    with pytest.raises(ValueError, match=r"steps 2 to 6"):  # it resumes from another place
        check_way_back(place, -1)
    place.close()


def test_what_goes_on_from_elsewhere_has_nothing_here_behind_it(tmp_path, monkeypatch):
    """If killed before its first save, the run would resume a lower step of the former lineage."""
    own, left = tmp_path / "own", tmp_path / "own/step_00000004.abandoned_1"
    saved(own, 2)
    saved(own, 4)
    place = open_place(own)
    monkeypatch.chdir(tmp_path)
    for uri, step, before in (
        (own / "step_00000002", 2, 2),
        ("own/step_00000004", 4, 4),
        (left, 4, -1),  # it does not say to which lineage the others belong
        (tmp_path / "other/step_00000003", 3, -1),
    ):
        found = SimpleNamespace(uri=str(uri), step=step)
        assert last_own_step(place, found) == before, uri
    run = SimpleNamespace(config=load_config("tiny_cpu", ["checkpoint.every=null"]), step=3)
    CheckpointScheduler(
        place, Owner("run", "start"), run, lambda phase: None, last_own=-1
    )._abandon_later()
    assert place.steps() == []
    assert (own / "step_00000002.abandoned_1" / "manifest.json").is_file()


def test_the_newest_checkpoint_of_a_run_is_found_from_any_working_folder(
    run_dir, tmp_path, monkeypatch
):
    saved(tmp_path / "place", 3)
    saved(tmp_path / "place", 5)
    saved(run_dir / "checkpoints", 9)  # for example of another run; run.json names this run's place
    monkeypatch.chdir(tmp_path)
    note_place(run_dir, open_place("place"))
    monkeypatch.chdir(run_dir)
    newest = f"{tmp_path}/place/step_00000005"
    assert latest_in(run_dir) == latest_in(tmp_path / "place") == latest_in(newest) == newest
    # `train` looks there as well; the file that it names is empty.
    told = refused("--run-dir", str(tmp_path / "new"), "--resume", str(run_dir))
    assert f"{newest}/manifest.json" in told
