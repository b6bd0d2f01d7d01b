"""The sbatch script: its text, and bash's opinion of it."""

import subprocess

import pytest

from launch.local.job import Job
from launch.slurm.options import SlurmOptions, limit_seconds
from launch.slurm.script import script

JOB = Job("/shared/runs/a/job.yaml", "/shared/runs/a", (), "latest")
CLUSTER = SlurmOptions(
    nodes=32,
    tasks_per_node=8,
    gpus_per_node=8,
    cpus_per_task=12,
    partition="gpu",
    account="lab",
    after=(7, 9),
    modules=("cuda/12",),
    setup=("source /env/bin/activate",),
    container="/images/kimi.sqsh",
    mounts=("/data:/data",),
    directives=("qos=high", "exclusive"),
)


def bash_accepts(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def directives(text: str) -> set[str]:
    lines = text.splitlines()
    return {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}


def test_directives():
    text = script(JOB, CLUSTER)
    bash_accepts(text)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert directives(text) == {
        "job-name=kimi-pretrain",
        "nodes=32",
        "ntasks-per-node=8",
        "cpus-per-task=12",
        "gpus-per-node=8",
        "time=1-00:00:00",
        "partition=gpu",
        "account=lab",
        "dependency=afterok:7:9",
        "kill-on-invalid-dep=yes",
        "output=/shared/runs/a/slurm-%j.out",
        "open-mode=append",
        "signal=B:USR1@760",
        "requeue",
        "qos=high",
        "exclusive",
    }
    # A signal may come while modules are loaded, which often reads unset variables.
    order = ("trap 'hear USR1' USR1", "module load cuda/12", "source /env/bin/activate", "set -u")
    assert [lines.index(line) for line in order] == sorted(lines.index(line) for line in order)
    assert "srun --kill-on-bad-exit=1 --container-image=/images/kimi.sqsh " in text
    assert "--container-mounts=/data:/data,/shared/runs/a:/shared/runs/a bash" in text


def test_a_mount_that_holds_the_run_folder_is_enough():
    options = SlurmOptions(1, 1, container="i", mounts=("/lustre/me:/shared/runs",))
    assert "--container-mounts=/lustre/me:/shared/runs bash" in script(JOB, options)
    options = SlurmOptions(1, 1, container="i", mounts=("/shared/run:/shared/run",))
    assert ",/shared/runs/a:/shared/runs/a bash" in script(JOB, options)


def test_without_gpus_and_requeue():
    text = script(JOB, SlurmOptions(nodes=1, tasks_per_node=4, requeue=False))
    bash_accepts(text)
    assert "gpus" not in text
    assert "#SBATCH --no-requeue" in text
    assert "scontrol requeue" not in text
    assert "late=1" not in text  # nothing is better than to wait for the save
    assert "signal=B:USR1@760" in directives(text)  # to save what was done


def test_an_array_gives_each_seed_a_run_of_its_own():
    options = SlurmOptions(nodes=1, tasks_per_node=4, seeds=(1, 2, 30))
    text = script(JOB, options, place="s3://bucket/sweep/")
    bash_accepts(text)
    assert {"array=1,2,30", "output=/shared/runs/a/seed_%a/slurm-%A.out"} <= directives(text)
    # What bash makes of it in element 30.
    head = "".join(
        line + "\n" for line in text.splitlines() if "job=" in line or "run_dir=" in line
    )
    shown = subprocess.run(
        ["bash", "-c", head + 'echo "$kimi_run_dir"; echo "$job"'],
        env={"SLURM_ARRAY_TASK_ID": "30"}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert shown[0] == "/shared/runs/a/seed_30"
    job = Job.parse(shown[1])
    assert (job.config, job.run_dir) == (JOB.config, "/shared/runs/a/seed_30")
    assert job.overrides == ("train.seed=30", "checkpoint.place=s3://bucket/sweep/seed_30")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"gpus_per_node": 4}, "gpus_per_node is 4 with 2 tasks"),
        ({"name": "a b"}, "job name 'a b'"),
        ({"partition": "a\n#SBATCH --uid=0"}, "partition 'a"),
        ({"directives": ("--qos=high",)}, "without dashes"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"time": "soon"}, "days-hours:minutes:seconds"),
        ({"time": "12"}, "--time 12 is 720 s, .* 820 s before .*--save-seconds 700"),
        ({"time": "1:00:00", "save_seconds": 3600}, "nothing would be trained"),
    ],
)
def test_impossible_options_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SlurmOptions(**{"nodes": 1, "tasks_per_node": 2, **wrong})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("2:00:05", 7205), ("1-12", 129_600),
        ("1-12:30", 131_400), ("1-00:00:01", 86_401), ("UNLIMITED", None),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_sbatch_reads_them(text, seconds):
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize(
    ("save", "stop"), [(1, 1), (30, 15), (60, 30), (240, 210), (3600, 3240)]
)  # fmt: skip
def test_a_stop_is_given_up_while_there_is_time_for_the_requeue(save, stop):
    assert SlurmOptions(1, 1, save_seconds=save).stop_seconds == stop
