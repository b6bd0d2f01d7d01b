"""The sbatch script: its text, bash's opinion of it, and runs under stand-ins for SLURM."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch.job import Job
from launch.slurm import SlurmOptions, limit_seconds, script

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
        "signal=B:USR1@300",
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
    assert "signal=B:USR1@300" in directives(text)  # to save what was done


def test_an_array_gives_each_seed_a_run_of_its_own():
    options = SlurmOptions(nodes=1, tasks_per_node=4, seeds=(1, 2, 30))
    text = script(JOB, options, place="s3://bucket/sweep/")
    bash_accepts(text)
    assert {"array=1,2,30", "output=/shared/runs/a/seed_%a/slurm-%A.out"} <= directives(text)
    # What bash makes of it in element 30.
    head = text[text.index("run_dir=") : text.index("mkdir")]
    shown = subprocess.run(
        ["bash", "-c", head + 'echo "$run_dir"; echo "$job"'],
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
        ({"time": "6"}, "--time 6 is 360 s, .* 360 s before .*--save-seconds 240"),
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


class Cluster:
    """Programs named srun, scontrol and python in a folder: two nodes of two tasks, one after the
    other, rank 0 on the second node. The ranks do what the file `act` says.
    """

    def __init__(self, folder: Path, **options):
        self.folder, self.run_dir = folder, folder / "run"
        (self.run_dir / "logs").mkdir(parents=True)
        programs = {
            "srun": """
trap 'touch $FOLDER/told; kill -USR1 $rank' USR1
while [[ $1 == --* ]]; do shift; done
code=0
for task in 0 1 2 3; do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NTASKS=4 \\
    FAKE_HOST=$([ $task -lt 2 ] && echo n2 || echo n1) "$@" &
  rank=$!
  while kill -0 $rank 2>/dev/null; do wait $rank || true; done
  wait $rank || code=$?
done
exit $code
""",
            "hostname": 'echo "$FAKE_HOST"\n',
            "scontrol": """
if [ "$1" = requeue ]; then echo "$@" >> $FOLDER/scontrol.log
else echo "JobId=12345 Requeue=1 Restarts=$(cat $FOLDER/starts) BatchFlag=1"; fi
""",
            "python-of-the-job": """
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $OMP_NUM_THREADS" \\
  >> $FOLDER/ranks
printf '%s\\n' "$@" > $FOLDER/argv
source $FOLDER/act
""",
        }
        (folder / "bin").mkdir()
        for name, body in programs.items():
            (folder / "bin" / name).write_text("#!/bin/bash\n" + body)
            (folder / "bin" / name).chmod(0o755)
        self.env = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}", "FOLDER": str(folder),
            "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[1-2]",
        }  # fmt: skip
        given = {"cpus_per_task": 3, "python": "python-of-the-job", **options}
        job = Job(f"{self.run_dir}/job.yaml", str(self.run_dir), (), "latest")
        self.file = folder / "job.sbatch"
        self.file.write_text(script(job, SlurmOptions(2, 2, **given)))

    def start(self, act: str, restart: int = 0) -> subprocess.Popen:
        (self.folder / "act").write_text(act)
        (self.folder / "starts").write_text(str(restart))
        (self.folder / "ranks").unlink(missing_ok=True)
        env = self.env | {"SLURM_RESTART_COUNT": str(restart)}
        return subprocess.Popen(["bash", self.file], env=env, stderr=subprocess.PIPE, text=True)

    def run(self, act: str, restart: int = 0) -> tuple[int, str]:
        """Return the exit code, and what the script said."""
        job = self.start(act, restart)
        _, said = job.communicate(timeout=50)
        return job.returncode, said

    def stands(self, state: str, reason: str = "") -> str:
        """Return the line of `act` that writes status.json."""
        status = json.dumps({"state": state, "step": 3, "reason": reason})
        return f"echo '{status}' > {self.run_dir}/status.json\n"

    def did_steps(self, steps: int) -> None:
        lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, steps + 1)]
        (self.run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def requeued(self) -> int:
        file = self.folder / "scontrol.log"
        lines = file.read_text().splitlines() if file.is_file() else []
        assert set(lines) <= {"requeue 12345"}
        return len(lines)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def test_every_task_becomes_a_rank(cluster):
    code, said = cluster.run(cluster.stands("finished"))
    assert code == 0, said
    assert "finished" in said
    assert cluster.requeued() == 0
    ranks = [line.split() for line in (cluster.folder / "ranks").read_text().splitlines()]
    assert [line[:4] + line[6:] for line in ranks] == [
        [str(rank), str(rank % 2), "4", "2", "3"] for rank in range(4)
    ]
    (address,), (port,) = {line[4] for line in ranks}, {line[5] for line in ranks}
    assert address == "n2"
    assert 20_000 + 12345 % 10_000 <= int(port) < 30_100
    argv = (cluster.folder / "argv").read_text().splitlines()
    assert argv[:2] == ["-m", "launch.worker"]
    assert Job.parse(argv[2]).resume == "latest"


def test_usr1_reaches_the_ranks_and_the_job_goes_back_when_they_have_ended(cluster):
    stopped = cluster.stands("stopped", "signal SIGUSR1 at rank 0")
    wait = "trap 'saved=1' USR1\nfor try in {1..300}; do [ $RANK$saved = 0 ] && sleep .1; done\n"
    job = cluster.start(wait + stopped)
    with job:
        while not (cluster.folder / "ranks").is_file():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        said = job.stderr.read()
        assert job.wait(50) == 0
    assert (cluster.folder / "told").is_file()
    assert "got USR1" in said
    assert "told to make room: back into the queue" in said
    assert cluster.requeued() == 1
    assert len((cluster.folder / "ranks").read_text().splitlines()) == 4


def test_usr1_before_the_ranks_have_begun_starts_none(cluster):
    slow = cluster.folder / "bin" / "hostname"
    slow.write_text(f"#!/bin/bash\ntouch {cluster.folder}/asked; sleep 1; echo n2\n")
    with cluster.start(cluster.stands("finished")) as job:
        while not (cluster.folder / "asked").is_file():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(50) == 0
    assert cluster.requeued() == 1
    assert not (cluster.folder / "ranks").exists()


def test_a_job_ended_by_request_is_no_success_and_not_requeued(cluster):
    code, said = cluster.run(cluster.stands("stopped", "signal SIGTERM at rank 0"))
    assert code == 143, said
    assert cluster.requeued() == 0


def test_ranks_told_without_the_script_make_room_all_the_same(cluster):
    code, said = cluster.run(cluster.stands("stopped", "signal SIGUSR1 at rank 0"))
    assert (code, cluster.requeued()) == (0, 1), said


@pytest.mark.parametrize("others", [2, 137], ids=["all", "others were killed"])
def test_what_the_user_must_mend_is_never_tried_again(cluster, others):
    word = f"printf 'no such data\\nexit code 2\\n' > {cluster.run_dir}/logs/error_rank_1.txt\n"
    code, said = cluster.run(f"if [ $RANK = 1 ]; then {word} exit 2; fi; exit {others}")
    assert code == 2, said
    assert cluster.requeued() == 0
    assert "does not mend" in said


def test_an_old_last_word_counts_for_nothing(cluster):
    (cluster.run_dir / "logs" / "error_rank_0.txt").write_text("long ago\nexit code 2\n")
    code, said = cluster.run("exit 1")
    assert (code, cluster.requeued()) == (0, 1), said


def test_failures_are_tried_again_while_the_run_gets_further(tmp_path):
    cluster, last = Cluster(tmp_path, max_restarts=2), 75
    for start, steps in enumerate((4, 4, 9, 9)):
        cluster.did_steps(steps)
        code, said = cluster.run(f"exit {last}", restart=start)
        assert code == 0, said
        assert f"failed (exit code {last}) after step {steps}" in said
        assert cluster.requeued() == start + 1
    code, said = cluster.run(f"exit {last}", restart=4)  # the third in a row after step 9
    assert code == last
    assert "2 restarts got no further" in said
    assert cluster.requeued() == 4


def test_without_restarts_the_ranks_exit_code_is_the_job_s(tmp_path):
    cluster = Cluster(tmp_path, max_restarts=0)
    assert cluster.run("exit 3")[0] == 3
    assert cluster.requeued() == 0


def test_ranks_that_end_well_before_the_last_step_do_not_make_a_success(tmp_path):
    cluster = Cluster(tmp_path, max_restarts=0)
    code, said = cluster.run(cluster.stands("running"))
    assert code == 1, said


def test_a_job_that_may_not_be_requeued_ends_badly_when_told_to_make_room(tmp_path):
    cluster = Cluster(tmp_path, requeue=False)
    code, said = cluster.run(cluster.stands("stopped", "signal SIGUSR1 at rank 0"))
    assert (code, cluster.requeued()) == (1, 0)
    assert "--no-requeue" in said


def test_a_start_that_was_given_up_leaves_the_next_one_alone(cluster):
    code, said = cluster.run(f"echo 1 > {cluster.folder}/starts; exit 1")
    assert (code, cluster.requeued()) == (1, 0)
    assert "a later start goes on already" in said


def test_a_refused_requeue_is_tried_again_and_then_told(cluster):
    program = cluster.folder / "bin" / "scontrol"
    program.write_text(
        f'#!/bin/bash\n[ "$1" = requeue ] && echo >> {cluster.folder}/tries && exit 1\n'
        'echo "JobId=12345 Restarts=0 BatchFlag=1"\n'
    )
    without_waiting(cluster)
    code, said = cluster.run("exit 1")
    assert code == 1
    assert "the requeue was refused" in said
    assert (cluster.folder / "tries").read_text().count("\n") == 6


def test_a_controller_that_is_away_for_a_moment_is_asked_again(cluster):
    program = cluster.folder / "bin" / "scontrol"
    away = f"[ $(cat {cluster.folder}/tries | wc -l) -lt 3 ] && exit 1"
    count = f"echo >> {cluster.folder}/tries"
    program.write_text(program.read_text().replace("#!/bin/bash", f"#!/bin/bash\n{count}\n{away}"))
    without_waiting(cluster)
    assert cluster.run("exit 1")[0] == 0
    assert cluster.requeued() == 1


def without_waiting(cluster):
    sleep = cluster.folder / "bin" / "sleep"
    sleep.write_text("#!/bin/bash\n")
    sleep.chmod(0o755)


def test_no_word_of_where_to_meet_is_a_failure_like_others(cluster):
    (cluster.folder / "bin" / "hostname").write_text("#!/bin/bash\nexit 1\n")
    (cluster.folder / "bin" / "srun").write_text("#!/bin/bash\nexit 1\n")
    code, said = cluster.run("exit 0")
    assert (code, cluster.requeued()) == (0, 1), said
    assert not (cluster.folder / "ranks").exists()
