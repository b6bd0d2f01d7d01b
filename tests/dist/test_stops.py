"""Runs that are stopped, hang or come upon a bad step, in real processes."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from kimi_pretrain.checkpoint.place import open_place
from kimi_pretrain.status import Status, read_status
from launch import supervise, torchrun
from launch.show import find_anomaly, show_rows
from tests.dist.jobs import ROOT, SMALL, layout, read_metrics, train
from tests.dist.live import ranks, started, steps_of, wait_for_steps
from tests.dist.planted import WORKER, PlantedJob

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

ONE = (*layout(), "train.seed=1")
FOUR = (*layout(pp=2, vpp=2, dp=2, ep=2), "train.seed=1")
PATIENCE = 30  # train.timeout_seconds: no phase of these steps takes as long, on any machine


def planted(
    run_dir: Path,
    plant: str,
    step: int,
    *overrides: str,
    rank: int = 0,
    processes: int = 1,
    resume: str | None = None,
) -> tuple[int, str | None]:
    """Train with a fault; returns exit code and message."""
    settings = (*SMALL, *overrides)
    job = PlantedJob("tiny_cpu", str(run_dir), settings, resume, plant=plant, step=step, rank=rank)
    command = [sys.executable, "-m", WORKER, job.argument()]
    if processes > 1:
        command = torchrun.command(job, torchrun.Nodes(processes), worker=WORKER)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment = torchrun.environment(environment, processes, 1)
    return supervise.run(command, environment, run_dir)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_a_run_that_may_not_restart(data_root, tmp_path):
    """With restarts: `test_resume.py`."""
    settings = (f"data.root={data_root}", "train.steps=1000", *FOUR)
    with started(tmp_path, *settings, f"train.timeout_seconds={PATIENCE}") as process:
        wait_for_steps(tmp_path, 2, process)
        ranks(process)[2].send_signal(signal.SIGSTOP)
        out, err = process.communicate(timeout=PATIENCE + 120)
    assert process.returncode == 75, out + err
    (line,) = [line for line in err.splitlines() if "no progress" in line]
    assert line.startswith(f"error: no progress for {PATIENCE} s (train.timeout_seconds)")
    assert "no word from rank 2: stopped" in line
    assert "Traceback" not in err
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.reason) == ("failed", line.removeprefix("error: "))


@pytest.mark.slow
def test_a_stop_that_cannot_save_is_not_in_order(data_root, tmp_path):
    """Or a scheduler would start it again and again, to do the same steps."""
    run_dir, place = tmp_path / "run", tmp_path / "place"
    settings = (f"data.root={data_root}", "train.steps=1000", *ONE, f"checkpoint.place={place}")
    with started(run_dir, *settings) as process:
        wait_for_steps(run_dir, 2, process)
        assert [file.name for file in place.iterdir()] == ["owner.json"]
        shutil.rmtree(place)
        place.touch()
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 2, out + err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "stopped (signal SIGUSR1 at rank 0), but the last step could not be saved: " in line
    assert str(place) in line
    assert line.endswith("there is no checkpoint yet")
    status = read_status(run_dir)
    assert status is not None
    assert (status.state, status.checkpoint) == ("failed", None)


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_changes_nothing(data_root, tmp_path):
    settings = (f"data.root={data_root}", "train.steps=8", "checkpoint.every=2", *FOUR)
    done = train(tmp_path / "straight", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    with started(tmp_path / "killed", *settings, "--max-restarts", "1") as process:
        wait_for_steps(tmp_path / "killed", 3, process)
        ranks(process)[3].kill()
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, out + err
    hashes = [
        json.loads((tmp_path / name / "state_hashes.json").read_text())
        for name in ("straight", "killed")
    ]
    assert hashes[0] == hashes[1]
    assert read_status(tmp_path / "killed") == Status(
        "finished", 8, 8, checkpoint=str(tmp_path / "killed" / "checkpoints" / "step_00000008")
    )


def test_a_step_that_is_not_finite_is_skipped_written_down_and_can_be_looked_at(
    data_root, tmp_path
):
    settings = (f"data.root={data_root}", "train.steps=4", *ONE)
    assert planted(tmp_path, "not_a_number", 2, *settings) == (0, None)
    text = (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [line["loss"] is None for line in lines] == [False, True, True, False]
    assert [line["applied"] for line in lines] == [True, False, False, True]
    assert [line["skipped_steps"] for line in lines] == [0, 1, 2, 2]
    assert [line["anomaly"] for line in lines] == [None, "nonfinite", "nonfinite", None]
    assert lines[3]["lr"] == lines[2]["lr"] == lines[1]["lr"]  # the schedule waited
    found = find_anomaly(tmp_path / "anomalies.jsonl", 3)
    assert (found["kind"], found["action"], found["loss"]) == ("nonfinite", "skip", None)
    assert len(found["samples"]) > 8  # of all rows
    page = show_rows(str(tmp_path / "config.yaml"), (), 0, range(2), found)
    assert "Step 3 of metrics.jsonl: nonfinite" in page
    assert read_status(tmp_path) == Status("finished", 4, 4)


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_with_its_phase(data_root, tmp_path):
    settings = (f"data.root={data_root}", "train.steps=9", *layout(dp=2), "train.seed=1")
    patience = f"train.timeout_seconds={PATIENCE}"
    code, message = planted(
        tmp_path, "sleep_in_encoder", 3, *settings, patience, rank=1, processes=2
    )
    assert code == 75
    assert message is not None
    assert "step 3, phase '2 vision forward'" in message
    assert "planted.py" in message  # the line that it sleeps at
    if not message.endswith("it waits for no other rank"):  # rank 1 may have been the first
        assert "held up by rank 1, in step 3, phase '2 vision forward'" in message
    assert "in late" in (tmp_path / "logs" / "stacks_rank_1.txt").read_text()
    assert steps_of(tmp_path) == 2


@pytest.mark.slow
def test_a_read_that_hangs_ends_in_time(data_root, tmp_path):
    settings = (f"data.root={data_root}", "train.steps=9", *ONE, "data.workers=0")
    code, message = planted(
        tmp_path, "hang_in_a_read", 3, *settings, f"train.timeout_seconds={PATIENCE}"
    )
    assert code == 75
    assert message is not None
    assert "phase '1 wait for data'" in message
    assert "it waits for no other rank" in message


@pytest.mark.slow
def test_a_spike_stops_the_run_where_it_is_told_to(data_root, tmp_path):
    settings = (
        f"data.root={data_root}", "train.steps=6", *ONE, "guard.spike=stop", "guard.spike_ratio=3",
        "guard.spike_window=2", "checkpoint.every=2",
    )  # fmt: skip
    code, message = planted(tmp_path, "spike", 4, *settings)
    assert code == 2
    assert message is not None
    assert message.startswith("step 4 is not applied: loss ")
    assert "(spike), guard.spike=stop" in message
    assert find_anomaly(tmp_path / "anomalies.jsonl", None)["step"] == 4
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.reason) == ("failed", message)
    assert status.checkpoint == str(tmp_path / "checkpoints" / "step_00000002")
    # The same step again, skipped this time: then the run goes on.
    done = train(tmp_path, *settings, "guard.spike=skip", resume=Path("latest"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_metrics(tmp_path)) == 6


@pytest.mark.slow
def test_a_signal_while_the_run_is_built_stops_it_before_its_first_step(data_root, tmp_path):
    settings = (f"data.root={data_root}", "train.steps=6", *ONE)
    assert planted(tmp_path, "term_at_the_start", 1, *settings) == (0, None)
    assert read_status(tmp_path) == Status("stopped", 0, 6, "signal SIGTERM at rank 0")
    assert steps_of(tmp_path) == 0
    assert not list(tmp_path.glob("checkpoints/step_*"))


@pytest.mark.slow
def test_what_a_step_draws_is_the_same_after_a_resume(data_root, tmp_path):
    """Every generator starts anew at every step, so none has to be saved."""
    settings = (f"data.root={data_root}", "train.steps=4", *ONE, "checkpoint.every=2")
    assert planted(tmp_path / "straight", "draws", 1, *settings) == (0, None)
    saved = str(tmp_path / "straight" / "checkpoints" / "step_00000002")
    assert planted(tmp_path / "resumed", "draws", 1, *settings, resume=saved) == (0, None)
    first, again = (
        [line["loss"] for line in read_metrics(tmp_path / name)] for name in ("straight", "resumed")
    )
    assert again == first[2:]
    done = train(tmp_path / "whole", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_metrics(tmp_path / "whole")[0]["loss"] != first[0]  # something was drawn


@pytest.mark.slow
def test_a_step_changes_nothing_that_is_still_being_copied_aside(data_root, tmp_path):
    """Neither weights nor state in the update, nor routing biases in the backbone before it."""
    settings = (f"data.root={data_root}", "train.steps=3", *ONE, "checkpoint.every=1")
    assert planted(tmp_path / "slow", "slow_copy", 1, *settings) == (0, None)
    done = train(tmp_path / "plain", *settings, "checkpoint.asynchronous=false")
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (1, 2, 3):
        slow, plain = (
            open_place(tmp_path / name / "checkpoints").checkpoint(step).manifest().files
            for name in ("slow", "plain")
        )
        assert slow == plain, step
    lines = read_metrics(tmp_path / "slow")[1:]
    stalls = [line["checkpoint"]["stall_seconds"] for line in lines]
    assert min(stalls) > 1, "nothing was waited for"


@pytest.mark.slow
def test_a_course_that_is_left_is_set_aside_before_anything_is_trained(data_root, tmp_path):
    """Who goes back to step 1 and is killed at once must not come back to step 3."""
    settings = (f"data.root={data_root}", *ONE, "checkpoint.every=1")
    done = train(tmp_path, *settings, "train.steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    place = open_place(tmp_path / "checkpoints")
    again = train(
        tmp_path, *settings, "train.steps=1", resume=tmp_path / "checkpoints" / "step_00000001"
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert place.steps() == [1]
    assert (tmp_path / "checkpoints" / "step_00000003" / "manifest.abandoned.json").is_file()
