"""The sbatch script: its text, bash's opinion of it, and a run under stand-ins for SLURM."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from launch.job import Job
from launch.slurm import SlurmOptions, script

JOB = Job("configs/kimi_k25_1t.yaml", "/shared/runs/a", ("train.steps=5",), "latest")
CLUSTER = SlurmOptions(
    nodes=32,
    tasks_per_node=8,
    gpus_per_node=8,
    cpus_per_task=12,
    partition="gpu",
    account="lab",
    modules=("cuda/12",),
    setup=("source /env/bin/activate",),
    container="/images/kimi.sqsh",
    mounts=("/shared:/shared", "/data:/data"),
)


def bash_accepts(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_directives():
    text = script(JOB, CLUSTER)
    bash_accepts(text)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")} == {
        "job-name=kimi-pretrain",
        "nodes=32",
        "ntasks-per-node=8",
        "cpus-per-task=12",
        "gpus-per-node=8",
        "time=1-00:00:00",
        "partition=gpu",
        "account=lab",
        "output=/shared/runs/a/slurm-%j.out",
        "open-mode=append",
        "requeue",
        "signal=B:USR1@300",
    }
    assert lines.index("module load cuda/12") < lines.index("source /env/bin/activate")
    assert "srun --kill-on-bad-exit=1 --container-image=/images/kimi.sqsh " in text
    assert "--container-mounts=/shared:/shared,/data:/data" in text


def test_without_gpus_and_requeue():
    text = script(JOB, SlurmOptions(nodes=1, tasks_per_node=4, requeue=False))
    bash_accepts(text)
    assert "gpus" not in text
    assert "USR1" not in text
    assert "#SBATCH --no-requeue" in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"gpus_per_node": 4}, "gpus_per_node is 4 with 2 tasks"),
        ({"name": "a b"}, "job name 'a b'"),
    ],
)
def test_impossible_options_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SlurmOptions(**{"nodes": 1, "tasks_per_node": 2, **wrong})


def cluster(folder: Path) -> dict[str, str]:
    """Programs named srun and scontrol: two nodes of two tasks, rank 0 on the second node."""
    bin_dir = folder / "bin"
    bin_dir.mkdir()
    programs = {
        "srun": """
while [[ $1 == --* ]]; do shift; done
for rank in 0 1 2 3; do
  SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) SLURM_NTASKS=4 \\
    FAKE_HOST=$([ $rank -lt 2 ] && echo n2 || echo n1) "$@" || exit $?
done
""",
        "hostname": 'echo "$FAKE_HOST"\n',
        "scontrol": f'echo "$@" >> {folder}/scontrol.log\n',
        "python-of-the-job": f"""
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $OMP_NUM_THREADS" \\
  >> {folder}/ranks
printf '%s\\n' "$@" > {folder}/argv
sleep "${{NAP:-0}}"
exit "${{FAIL:-0}}"
""",
    }
    for name, body in programs.items():
        (bin_dir / name).write_text("#!/bin/bash\n" + body)
        (bin_dir / name).chmod(0o755)
    return {
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12345",
    }


def job_file(folder: Path) -> Path:
    options = SlurmOptions(nodes=2, tasks_per_node=2, cpus_per_task=3, python="python-of-the-job")
    file = folder / "job.sbatch"
    file.write_text(script(JOB, options))
    return file


def test_every_task_becomes_a_rank(tmp_path):
    env = cluster(tmp_path)
    subprocess.run(["bash", job_file(tmp_path)], env=env, check=True)
    port = 20_000 + 12345 % 10_000
    assert (tmp_path / "ranks").read_text().splitlines() == [
        f"{rank} {rank % 2} 4 2 n2 {port} 3" for rank in range(4)
    ]
    module, name, job = (tmp_path / "argv").read_text().splitlines()
    assert (module, name) == ("-m", "launch.worker")
    assert Job(**{**json.loads(job), "overrides": ("train.steps=5",)}) == JOB


def test_a_requeued_job_meets_elsewhere(tmp_path):
    env = cluster(tmp_path) | {"SLURM_RESTART_COUNT": "2"}
    subprocess.run(["bash", job_file(tmp_path)], env=env, check=True)
    port = 20_000 + (12345 + 202) % 10_000
    assert f"n2 {port}" in (tmp_path / "ranks").read_text()


def test_the_ranks_exit_code_is_the_job_s(tmp_path):
    env = cluster(tmp_path) | {"FAIL": "3"}
    assert subprocess.run(["bash", job_file(tmp_path)], env=env, check=False).returncode == 3


def test_the_signal_requeues_and_the_script_still_waits_for_the_ranks(tmp_path):
    env = cluster(tmp_path) | {"NAP": "0.4"}
    with subprocess.Popen(["bash", job_file(tmp_path)], env=env) as job:
        while not (tmp_path / "ranks").is_file():
            assert job.poll() is None
        job.send_signal(signal.SIGUSR1)
        assert job.wait(20) == 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 12345\n"
    assert len((tmp_path / "ranks").read_text().splitlines()) == 4
