"""Tests of `kimi-pretrain submit`: its refusals, the files that it writes, and its output."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_pretrain.checkpoint import storage_read
from kimi_pretrain.checkpoint.errors import CheckpointUnavailable
from kimi_pretrain.config import load_config
from launch.cli.main import app
from launch.local.job import Job
from launch.slurm import queue as slurm_queue
from launch.slurm.options import parse_seeds
from launch.slurm.queue import JobState, Tail, parse_job, worst_exit_code

CPU = ("--config", "tiny_cpu", "--gpus-per-node", "0", "--tasks-per-node", "2")


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Put stand-ins for sbatch and scontrol on PATH.

    sbatch accepts every script as job 41 and records its arguments. scontrol answers with the
    lines of the file `states`, one per call; the last line repeats.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\necho "41;lab"\n')
    (folder / "scontrol").write_text(
        f"#!/bin/sh\nhead -n 1 {tmp_path}/states\n"
        f"[ $(wc -l < {tmp_path}/states) = 1 ] || sed -i 1d {tmp_path}/states\n"
    )
    for program in folder.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_queue, "POLL_SECONDS", 0.01)
    return tmp_path


def submit(*arguments: str, unchecked: bool = True):
    begin = ["submit", *CPU, *(["--unchecked"] if unchecked else [])]
    return CliRunner().invoke(app, [*begin, *arguments])


def refused(*arguments: str, unchecked: bool = True) -> str:
    result = submit(*arguments, unchecked=unchecked)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_what_is_submitted_is_the_configuration_of_now(sbatch):
    folder = sbatch / "run"
    result = submit("--run-dir", str(folder), "--no-follow", "train.steps=7")
    assert result.exit_code == 0, result.output
    assert result.output == f"job 41; its log: {folder}/slurm-41.out\n"
    assert (sbatch / "called").read_text() == f"--parsable {folder}/job.sbatch\n"
    kept = load_config(folder / "job.yaml")
    assert kept == load_config("tiny_cpu", ["train.steps=7"])
    text = (folder / "job.sbatch").read_text()
    job = next(line for line in text.splitlines() if line.startswith("kimi_job='"))
    assert Job.parse(job.removeprefix("kimi_job='").removesuffix("'")) == Job(
        str(folder / "job.yaml"), str(folder), (), "latest", or_start=True
    )
    assert f"kimi_python={sys.executable}\n" in text
    assert submit("--run-dir", str(folder), "--dry-run", "train.steps=7").output == text


def test_a_run_may_go_over_to_other_data(sbatch):
    folder = str(sbatch / "run")
    saved = sbatch / "run" / "checkpoints" / "step_00000002"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    text = submit("--run-dir", folder, "--resume", "latest", "--change-data", "--dry-run").output
    job = next(line for line in text.splitlines() if line.startswith("kimi_job='"))
    assert Job.parse(job.removeprefix("kimi_job='").removesuffix("'")).change_data
    told = refused("--run-dir", str(sbatch / "new"), "--change-data")
    assert "--change-data is for a run that goes on: add --resume latest" in told


def test_scripts_can_read_the_number(sbatch):
    folder = str(sbatch / "run")
    assert submit("--run-dir", folder, "--parsable").output == "41\n"
    told = json.loads(submit("--run-dir", folder, "--json").output)
    script, log = f"{folder}/job.sbatch", f"{folder}/slurm-41.out"
    assert told == {"job": 41, "script": script, "log": log}


def test_a_stop_that_is_given_up_before_the_watchdog_comes_is_told(sbatch):
    new = ("--run-dir", str(sbatch / "run"), "--dry-run")
    told = submit(*new, "train.timeout_seconds=600", "--save-seconds=240")
    assert told.stdout.startswith("#!/bin/bash\n")  # only the script
    (line,) = told.stderr.splitlines()
    assert line.startswith("warning: a rank that hangs while the job stops will not be named")
    assert "after 210 s (--save-seconds 240)" in line
    assert "after 600 s (train.timeout_seconds)" in line
    assert submit(*new, "train.timeout_seconds=600").stderr == ""  # default limits
    new += ("--save-seconds=240",)
    for enough in (("--no-requeue",), ("train.timeout_seconds=209",)):
        assert submit(*new, "train.timeout_seconds=600", *enough).stderr == ""
    new = (*new[:2], "--parsable", "--save-seconds=240")
    told = submit(*new, "train.timeout_seconds=210")
    assert (told.stdout, told.stderr.count("warning:")) == ("41\n", 1)


def test_a_container_has_an_interpreter_of_its_own(sbatch):
    text = submit("--run-dir", str(sbatch / "run"), "--dry-run", "--container", "a.sqsh").output
    assert "kimi_python=python3\n" in text


def test_an_array_has_a_folder_for_each_seed(sbatch):
    folder = sbatch / "sweep"
    result = submit("--run-dir", str(folder), "--seeds", "0-2,7", "--parsable")
    assert result.output == "41\n"
    assert sorted(path.name for path in folder.glob("seed_*/logs")) == ["logs"] * 4
    assert "#SBATCH --array=0,1,2,7\n" in (folder / "job.sbatch").read_text()


def test_seeds_are_numbers_and_ranges():
    assert parse_seeds("3,1,5-7") == (1, 3, 5, 6, 7)
    assert parse_seeds(None) == ()
    for wrong in ("", "1,", "a", "3-1", "-1", "1-", "1,0-2"):
        with pytest.raises(ValueError, match="--seeds"):
            parse_seeds(wrong)


def test_what_cannot_run_is_refused_before_it_waits_in_the_queue(sbatch):
    new = ("--run-dir", str(sbatch / "new"))
    assert "train.stepz" in refused(*new, "train.stepz=1")
    assert "do not divide over nodes of 3 tasks" in refused(*new, "--tasks-per-node", "3")
    assert "--save-seconds" in refused(*new, "--time", "5")
    assert "cannot write into /proc" in refused("--run-dir", "/proc/runs/a")
    told = refused("--run-dir", str(sbatch / "bin" / "sbatch" / "a"))
    assert f"{sbatch}/bin/sbatch is a file; expected a folder" in told
    assert "use letters" in refused("--run-dir", str(sbatch / "a b"))
    assert "expected numbers" in refused(*new, "--seeds", "x")
    assert not (sbatch / "new").exists()
    assert not (sbatch / "called").exists()


@pytest.mark.parametrize("seeds", [(), ("--seeds", "0-3")], ids=["one", "array"])
def test_an_earlier_run_is_gone_on_with_only_by_request(sbatch, seeds):
    folder = sbatch / "run"
    old = folder / "seed_2" if seeds else folder
    (old / "checkpoints" / "step_00000005").mkdir(parents=True)
    (old / "checkpoints" / "step_00000005" / "manifest.json").touch()  # marks it as complete
    new = ("--run-dir", str(folder), *seeds, "--parsable")
    other = sbatch / "other" / "checkpoints"
    other.mkdir(parents=True)
    (other / "owner.json").touch()  # a start on a wrong path leaves this file
    assert submit("--run-dir", str(other.parent), "--parsable").output == "41\n"
    assert "holds an earlier run; go on with --resume latest" in refused(*new)
    # The run's own checkpoints would be newer than the requested one.
    assert "holds an earlier run" in refused(*new, "--resume", "/other/step_00000001")
    if seeds:  # the other seeds have no checkpoint
        told = refused(*new, "--resume", "latest")
        assert f"{folder}/seed_0 holds no run; is --run-dir right?" in told
        new += ("--or-start",)
    assert submit(*new, "--resume", "latest").output == "41\n"


def test_latest_is_not_submitted_where_nothing_is_found(sbatch):
    """A requeued job still starts fresh, because it may have died before its first save."""
    new = ("--run-dir", str(sbatch / "rnu"), "--resume", "latest", "--parsable")
    assert f"{sbatch}/rnu holds no run; is --run-dir right?" in refused(*new)
    assert not (sbatch / "rnu").exists()
    assert submit(*new, "--or-start").output == "41\n"
    (sbatch / "rnu" / "metrics.jsonl").write_text('{"step": 1}\n')
    new += (f"checkpoint.place={sbatch}/place",)
    told = refused(*new, "--seeds", "1", unchecked=False)
    assert f"no checkpoint in {sbatch}/place/seed_1" in told
    told = refused(*new, unchecked=False)
    assert f"no checkpoint in {sbatch}/place, but {sbatch}/rnu/metrics" in told


def test_where_no_checkpoint_could_be_looked_for_the_job_begins_only_by_request(
    sbatch, monkeypatch
):
    """The job looks for a checkpoint on the nodes and needs `--or-start` to start without one."""
    looked: list[tuple[str, float]] = []

    def away(uri: str, patience: float = storage_read.PATIENCE_S) -> storage_read.Place:
        looked.append((str(uri), patience))
        raise CheckpointUnavailable(f"{uri} does not answer")

    monkeypatch.setattr(storage_read, "open_place", away)
    new = ("--run-dir", str(sbatch / "rnu"), "checkpoint.place=s3://b/rnu", "--resume", "latest")
    for options in ((), ("--dry-run",), ("--seeds", "1-3", "--or-start")):
        text = submit(*new, *options, "--dry-run").stdout
        assert ('"or_start": true' in text) == ("--or-start" in options)
    assert looked == []
    monkeypatch.setattr("launch.cli.submit.check_reachable", lambda *_: None)
    told = submit(*new, "--seeds", "1-3", "--parsable", unchecked=False)
    assert told.stdout == "41\n"
    (line,) = told.stderr.splitlines()
    assert line == (
        "warning: not looked for a checkpoint from here, the job will: s3://b/rnu/seed_1 does not "
        "answer"
    )
    assert looked == [("s3://b/rnu/seed_1", 20.0)]
    assert '"or_start": false' in (sbatch / "rnu" / "job.sbatch").read_text()


def test_a_run_that_starts_from_a_checkpoint_goes_on_from_its_own(sbatch):
    text = submit("--run-dir", str(sbatch / "run"), "--dry-run", "--resume", "/o/step_1").output
    assert '"resume": "latest", "otherwise": "/o/step_1"' in text


def test_no_slurm_here_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch is not on PATH" in refused("--run-dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_what_sbatch_refuses_is_told(sbatch):
    (sbatch / "bin" / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2; exit 1\n")
    assert "sbatch refused" in refused("--run-dir", str(sbatch / "run"))
    assert "invalid partition" in refused("--run-dir", str(sbatch / "run"))


def one(state: str, code: str = "0:0", **more: str) -> str:
    values = {
        "JobId": "41", "JobName": "a", "JobState": state, "Reason": "None", "ExitCode": code,
        "Restarts": "0", "NodeList": "n[1-2]", "StdOut": "/nowhere", **more,
    }  # fmt: skip
    return " ".join(f"{key}={value}" for key, value in values.items()) + "\n"


def test_follow_shows_the_log_and_ends_as_the_job_does(sbatch):
    folder = sbatch / "run"
    log = sbatch / "log"
    log.write_text("step 1\nbar\rbar again\nhalf a li")
    more = {"StdOut": str(log)}
    (sbatch / "states").write_text(
        one("PENDING", Reason="Priority", **more) + one("RUNNING", **more)
        + one("PENDING", Reason="BeginTime", Restarts="1", **more)
        + one("RUNNING", Restarts="1", **more) + one("FAILED", "3:0", Restarts="1", **more)
    )  # fmt: skip
    result = submit("--run-dir", str(folder), "--follow")
    assert result.exit_code == 3, result.output
    assert result.stdout.splitlines()[1:] == ["step 1", "bar again"]
    assert result.stderr.splitlines() == [
        "-- job 41 PENDING (Priority)",
        "-- job 41 RUNNING on n[1-2]",
        "-- job 41 PENDING (BeginTime)",
        "-- job 41 RUNNING on n[1-2], start 1",
        "-- job 41 FAILED, exit code 3, 1 requeues",
    ]


def test_ctrl_c_leaves_the_job_alone_and_says_so(sbatch, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_queue, "follow", interrupt)
    result = submit("--run-dir", str(sbatch / "run"), "--follow")
    assert result.exit_code == 130
    assert "job 41 goes on without this terminal" in result.stderr
    assert "scancel 41" in result.stderr


def test_elements_of_an_array_are_told_apart():
    found = parse_job(one("CANCELLED", "0:15", ArrayJobId="40", ArrayTaskId="3"))
    assert (found.label, found.exit_code, found.ended) == ("40_3", 143, True)
    good = parse_job(one("COMPLETED"))
    assert worst_exit_code([good, found]) == 143
    assert worst_exit_code([good]) == 0
    assert worst_exit_code([parse_job(one("TIMEOUT"))]) == 1


def test_a_forgotten_job_is_told(sbatch):
    program = sbatch / "bin" / "scontrol"
    program.write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
    )
    result = submit("--run-dir", str(sbatch / "run"), "--follow")
    assert result.exit_code == 1
    assert "sacct -j 41" in result.stderr


def test_a_tail_gives_whole_lines_once(tmp_path):
    tail = Tail(tmp_path / "log")
    assert list(tail.lines()) == []
    (tmp_path / "log").write_text("one\ntw")
    assert list(tail.lines()) == ["one"]
    with (tmp_path / "log").open("a") as file:
        file.write("o\n")
    assert list(tail.lines()) == ["two"]
    assert list(tail.lines()) == []


def test_states_are_told_in_words():
    state = JobState("4", "RUNNING", "None", 0, 0, "n1", Path("/log"))
    assert str(state) == "job 4 RUNNING on n1"


def test_help_is_instant():
    code = (
        "import sys, launch.cli.submit\n"
        "assert not {'torch', 'numpy', 'pydantic', 'boto3'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
