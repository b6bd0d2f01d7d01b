"""Stopped runs, hanging runs and bad steps, in real processes."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.reliability.status import Status, read_status
from launch.cli.data_show import find_anomaly, show_rows
from launch.local import supervise, torchrun
from tests import ROOT, fork_server
from tests.dist.jobs import SMALL, layout, read_metrics, train
from tests.dist.live import (
    open_to_others,
    ranks,
    started,
    steps_of,
    wait_for,
    wait_for_steps,
)
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
    """Train with a fault; return exit code and message."""
    settings = (*SMALL, *overrides)
    job = PlantedJob("tiny_cpu", str(run_dir), settings, resume, plant=plant, step=step, rank=rank)
    base = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    nodes = torchrun.Nodes(processes)
    with torchrun.prepared(job, nodes, WORKER, base=base) as (command, environment):
        if processes == 1:
            command = [str(fork_server.python()), "-m", WORKER, job.argument()]
        return supervise.run(command, environment, run_dir)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_a_run_that_may_not_restart(data_root, tmp_path):
    """`test_resume.py` covers the case with restarts."""
    settings = (f"data.root={data_root}", "train.steps=1000", *FOUR)
    with started(tmp_path, *settings, f"train.timeout_seconds={PATIENCE}") as process:
        wait_for_steps(tmp_path, 2, process)
        ranks(process)[2].send_signal(signal.SIGSTOP)
        out, err = process.communicate(timeout=PATIENCE + 120)
    assert process.returncode == 75, out + err
    (line,) = [line for line in err.splitlines() if "no progress" in line]
    assert re.match(r"error: no progress for \d+ s \(train\.timeout_seconds\)", line)
    assert "no word from rank 2: stopped" in line
    assert "Traceback" not in err
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.reason) == ("failed", line.removeprefix("error: "))


@pytest.mark.slow
def test_a_stop_that_cannot_save_is_not_in_order(data_root, tmp_path):
    """Otherwise a scheduler would restart it forever to repeat the same steps."""
    run_dir, place = tmp_path / "run", tmp_path / "place"
    settings = (f"data.root={data_root}", "train.steps=1000", *ONE, f"checkpoint.place={place}")
    with started(run_dir, *settings) as process:
        wait_for_steps(run_dir, 2, process)
        assert not open_to_others(process)  # a single process uses gloo too
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
def test_a_run_folder_without_room_ends_no_training(data_root, tmp_path):
    """The checkpoint place has space, so saves continue and a stop succeeds."""
    run_dir, place = tmp_path / "run", tmp_path / "place"
    run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(run_dir)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    settings = (
        f"data.root={data_root}", "train.steps=1000", *ONE, f"checkpoint.place={place}",
        "checkpoint.every=2", "checkpoint.keep_last=2",
    )  # fmt: skip
    try:
        with started(run_dir, *settings) as process:
            wait_for_steps(run_dir, 2, process)
            with pytest.raises(OSError, match="No space left"):
                (run_dir / "theirs").write_bytes(bytes(1 << 20))
            wait_for(lambda: newest(place) >= steps_of(run_dir) + 6, process)
            full = steps_of(run_dir)
            wait_for(lambda: read_status(run_dir).step >= full + 4, process)  # written in place
            process.send_signal(signal.SIGUSR1)
            out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        assert "Traceback" not in err
        assert f"{run_dir}/metrics.jsonl: No space left on device; training goes on" in err
        status = read_status(run_dir)
        assert status is not None
        assert (status.state, status.checkpoint) == (
            "stopped", str(place / f"step_{status.step:08d}")
        )  # fmt: skip
        (run_dir / "theirs").unlink()
        done = train(run_dir, *settings, f"train.steps={status.step + 2}", resume=Path("latest"))
        assert done.returncode == 0, done.stdout + done.stderr
        steps = [line["step"] for line in read_metrics(run_dir)]
        assert steps[-2:] == [status.step + 1, status.step + 2]
    finally:
        subprocess.run(["umount", "-l", str(run_dir)], check=True)


@pytest.mark.slow
def test_a_run_folder_that_is_full_at_the_end_ends_no_training_in_failure(data_root, tmp_path):
    names = ("state_hashes.json", "efficiency.json")
    for name in names:  # the file is first written under this name
        (tmp_path / f"{name}.partial").symlink_to("/dev/full")
    settings = (f"data.root={data_root}", "train.steps=1", *ONE, "train.efficiency_pairs=1")
    done = train(tmp_path, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_status(tmp_path) == Status("finished", 1, 1)
    for name in names:
        assert f"{tmp_path / name}: No space left on device; the run goes on" in done.stderr


def newest(place: Path) -> int:
    names = [file.parent.name[5:] for file in place.glob("step_*/manifest.json")]
    return max((int(name) for name in names if name.isdigit()), default=0)  # others are partial


@pytest.mark.slow
@pytest.mark.parametrize("axes", [FOUR, ONE], ids=["of four", "the only one"])
def test_a_killed_rank_is_started_again_and_changes_nothing(axes, data_root, tmp_path):
    settings = (f"data.root={data_root}", "train.steps=8", "checkpoint.every=2", *axes)
    done = train(tmp_path / "straight", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    with started(tmp_path / "killed", *settings, "--max-restarts", "1") as process:
        wait_for_steps(tmp_path / "killed", 3, process)
        assert not open_to_others(process)  # nor do checkpoint writers listen
        ranks(process)[max(ranks(process))].kill()
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
    assert len(found["samples"]) > 8  # samples of all rows
    page = show_rows(str(tmp_path / "config.yaml"), (), 1, range(2), found)
    assert "Step 3 of metrics.jsonl: nonfinite" in page
    assert read_status(tmp_path) == Status("finished", 4, 4)


@pytest.mark.slow
def test_a_copy_with_a_wrong_bit_ends_the_run_before_it_is_saved(data_root, tmp_path, capfd):
    settings = (f"data.root={data_root}", "train.steps=9", *layout(dp=2), "checkpoint.every=1")
    assert planted(tmp_path, "flip_a_bit", 3, *settings, rank=1, processes=2) == (1, None)
    told = capfd.readouterr().err
    assert re.search(r"Error: step 3: \S+ is one on rank 0, another on rank 1: ", told)
    assert newest(tmp_path / "checkpoints") <= 2
    assert len(read_metrics(tmp_path)) == 2


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
    assert "planted.py" in message  # the line at which it sleeps
    if not message.endswith("it waits for no other rank"):  # rank 1 may have reported first
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
def test_a_bug_in_a_step_is_not_the_user_s_to_mend(data_root, tmp_path, capfd):
    (tmp_path / "list.jsonl").write_text('{"source": "words", "key": "w0003", "from_step": 2}\n')
    settings = (f"data.root={data_root}", "train.steps=4", *ONE)
    settings += (f"data.tombstones={tmp_path}/list.jsonl",)
    assert planted(tmp_path, "bug", 1, *settings) == (1, None)
    # The facts that exposure needs are written before the first step is done.
    noted = json.loads((tmp_path / "tombstones.json").read_text())
    assert noted == {"tombstones": [["words", 3, 1]], "redacted": []}
    assert not (tmp_path / "metrics.jsonl").exists()
    status, shown = read_status(tmp_path), capfd.readouterr().err
    assert status is not None
    assert (status.state, status.reason) == (
        "failed", "StepFault: ValueError: operands could not be broadcast together"
    )  # fmt: skip
    assert "planted.py" in shown  # a traceback
    assert "in wrong" in shown


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
    # The repeated step is skipped this time, and the run continues.
    done = train(tmp_path, *settings, "guard.spike=skip", resume=Path("latest"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_metrics(tmp_path)) == 6


def test_a_run_has_finished_when_nothing_of_it_is_left_to_write(data_root, tmp_path):
    settings = (f"data.root={data_root}", "train.steps=1", *ONE, "checkpoint.every=1")
    code, _ = planted(tmp_path, "ends_at_the_last_barrier", 1, *settings)
    assert code == 1
    status = read_status(tmp_path)
    assert status is not None
    assert status.state == "failed"
    assert "it said Status(state='running', step=0" in str(status.reason)


def test_a_run_tells_its_sources_before_it_reads_them(data_root, tmp_path):
    """Covers a start that fails at the first index, in a folder with an earlier start."""
    root, folder = tmp_path / "corpus", tmp_path / "run"
    shutil.copytree(data_root, root)
    for file in root.glob("*/index.parquet"):
        file.write_bytes(b"damaged")
    folder.mkdir()
    noted = {"name": "words", "use": "train", "content_hash": "of its start", "redacted": 7}
    (folder / "sources.json").write_text(json.dumps([noted]))
    settings = (f"data.root={root}", "train.validate_every=1", *ONE)
    settings += ("data.heldout={words_heldout: 1}",)
    code, message = planted(folder, "bug", 1, *settings)
    assert code == 2
    assert "index_sha256" in str(message)
    told = json.loads((folder / "sources.json").read_text())
    assert told[0] == noted
    assert [(one["name"], one["use"]) for one in told[1:]] == [
        ("pictures", "train"), ("words_heldout", "heldout")
    ]  # fmt: skip
    for one in told[1:]:
        manifest = json.loads((root / one["name"] / "manifest.json").read_text())
        assert (one["content_hash"], one["root"]) == (manifest["content_hash"], str(root))
        assert one["made_as"] == one["content_hash"]
    (folder / "sources.json").write_text('[{"name": "words"}]')
    code, message = planted(folder, "bug", 1, *settings)
    assert (code, "sources.json: expected what a run writes" in str(message)) == (2, True)


@pytest.mark.slow
def test_a_signal_while_the_run_is_built_stops_it_before_its_first_step(data_root, tmp_path):
    settings = (f"data.root={data_root}", "train.steps=6", *ONE)
    assert planted(tmp_path, "term_at_the_start", 1, *settings) == (0, None)
    assert read_status(tmp_path) == Status("stopped", 0, 6, "signal SIGTERM at rank 0")
    assert steps_of(tmp_path) == 0
    assert not list(tmp_path.glob("checkpoints/step_*"))


@pytest.mark.slow
def test_what_a_step_draws_is_the_same_after_a_resume(data_root, tmp_path):
    """Every generator is reseeded at every step, so none has to be saved."""
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
    assert read_metrics(tmp_path / "whole")[0]["loss"] != first[0]  # random numbers were drawn


@pytest.mark.slow
def test_a_step_changes_nothing_that_is_still_being_copied_aside(data_root, tmp_path):
    """Covers weights and state in the update, and routing biases in the backbone before it."""
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
    """A run that returns to step 1 and is killed at once must not resume from step 3."""
    settings = (f"data.root={data_root}", *ONE, "checkpoint.every=1")
    done = train(tmp_path, *settings, "train.steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    place = open_place(tmp_path / "checkpoints")
    again = train(
        tmp_path, *settings, "train.steps=1", resume=tmp_path / "checkpoints" / "step_00000001"
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert place.steps() == [1]
    kept = tmp_path / "checkpoints" / "step_00000003.abandoned_1"
    assert f"latest will not take it (kept as {kept})" in again.stderr
    # Its lines are kept too, and the abandoned checkpoint can be resumed.
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    left = (tmp_path / "metrics.abandoned.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in left] == [2, 3]
    assert "lines of another start, up to step 3, are in metrics.abandoned.jsonl" in again.stderr
    back = train(tmp_path / "back", *settings, "train.steps=4", resume=kept)
    assert back.returncode == 0, back.stdout + back.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "back")] == [4]


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_begins_again_and_keeps_its_lines(
    data_root, tmp_path, monkeypatch
):
    """torchrun and batch scripts restart it automatically; a user must confirm."""
    run_dir = tmp_path / "run"
    settings = (f"data.root={data_root}", *ONE, "checkpoint.every=2")
    with started(run_dir, *settings, "train.steps=1000", "checkpoint.every=1000") as process:
        wait_for_steps(run_dir, 3, process)
        process.kill()
        process.communicate()
    first = (run_dir / "metrics.jsonl").read_text()
    done = train(run_dir, *settings, resume=Path("latest"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"no checkpoint in {run_dir}/checkpoints, but {run_dir}/metrics.jsonl" in done.stderr
    # The ranks reach the same result, because no check precedes them here.
    code, message = planted(run_dir, "draws", 1, *settings, resume="latest")
    assert code == 2
    assert message is not None
    assert "holds steps" in message
    assert (run_dir / "metrics.jsonl").read_text() == first
    with monkeypatch.context() as torchrun_again:
        torchrun_again.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert planted(run_dir, "draws", 1, *settings, "train.steps=2") == (0, None)
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2]
    kept = (run_dir / "metrics.abandoned.jsonl").read_text()
    assert kept == first[: first.rfind("\n") + 1]
    # Now steps could be lost, so another place or another folder is refused.
    other = f"checkpoint.place={tmp_path / 'other'}"
    code, message = planted(run_dir, "draws", 1, *settings, other, resume="latest")
    assert code == 2
    assert message is not None
    assert (
        f"saves to {run_dir}/checkpoints (run.json), but checkpoint.place is {tmp_path}/other"
        in (message)
    )
    code, message = planted(tmp_path / "rnu", "draws", 1, *settings, resume="latest")
    assert code == 2
    assert message is not None
    assert f"{tmp_path}/rnu holds no run; is --run-dir right?" in message
