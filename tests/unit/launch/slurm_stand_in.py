"""Stand-ins for SLURM's programs and for the ranks, for running the sbatch script."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from launch.local.job import Job
from launch.slurm.options import SlurmOptions
from launch.slurm.script import script

# Rank 0 waits for the stop signal, for at most a minute; the other ranks do not wait.
UNTIL_TOLD = "for try in {1..600}; do [ $RANK$told = 0 ] && sleep .1; done\n"


class Cluster:
    """Folder with stand-ins named srun, scontrol and python.

    srun runs two nodes of two tasks, one task after the other; rank 0 is on the second node.
    Each rank runs the shell code of the file `act`.
    """

    def __init__(self, folder: Path, nodes: int = 2, **options):
        self.folder, self.run_dir, self.said = folder, folder / "run", folder / "said"
        (self.run_dir / "logs").mkdir(parents=True)
        programs = {
            # Bash's `wait` sometimes loses an exit code when signals follow each other closely.
            "srun": """
trap 'touch $FOLDER/told; kill -USR1 $(cat $FOLDER/heeds_$task 2>/dev/null) 2>/dev/null' USR1
options=(); while [[ $1 == --* ]]; do options+=("$1"); shift; done
printf '%s|' "${options[@]}" >> $FOLDER/srun_options; echo >> $FOLDER/srun_options
code=0
for task in 0 1 2 3; do
  export SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NTASKS=4
  export FAKE_HOST=$([ $task -lt 2 ] && echo n2 || echo n1)
  { "$@" || echo $? > $FOLDER/code_$$_$task; } &
  while kill -0 $! 2>/dev/null; do wait $! || true; done
  if [ -e $FOLDER/code_$$_$task ]; then code=$(cat $FOLDER/code_$$_$task); fi
done
exit $code
""",
            "hostname": 'echo "$FAKE_HOST"\n',
            # Shortens the 3 s between two signals to 0.1 s.
            "sleep": "echo >> $FOLDER/sleeps; exec /bin/sleep ${1/#3/.1}\n",
            # When asked for the job id of a whole array, SLURM lists its other elements, too.
            "scontrol": """
if [ "$1" = requeue ]; then echo "$@" >> $FOLDER/scontrol.log; exit; fi
echo "JobId=12345 Requeue=1 Restarts=$(cat $FOLDER/starts) BatchFlag=1"
if [ -n "${SLURM_ARRAY_TASK_ID-}" ] && [ "${@: -1}" = 12345 ]; then
  echo "JobId=12346 ArrayJobId=12345 Requeue=1 Restarts=7 BatchFlag=1"
fi
""",
            "python-of-the-job": """
told=; trap 'told=1' USR1; echo $$ > $FOLDER/heeds_$RANK
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $OMP_NUM_THREADS" \\
  >> $FOLDER/ranks
printf '%s\\n' "$@" > $FOLDER/argv
source $FOLDER/act
""",
        }
        (folder / "bin").mkdir(parents=True)
        for name, body in programs.items():
            # Python can handle a signal that was ignored when it started; bash cannot.
            shell = (
                "/usr/bin/env -S --default-signal=USR1 bash" if "python" in name else "/bin/bash"
            )
            self.program(name, f"#!{shell}\n{body}")
        self.env = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}", "FOLDER": str(folder),
            "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_ID": "1",
        }  # fmt: skip
        given = {"cpus_per_task": 3, "python": "python-of-the-job", **options}
        job = Job(f"{self.run_dir}/job.yaml", str(self.run_dir), (), "latest")
        self.file = folder / "job.sbatch"
        self.file.write_text(script(job, SlurmOptions(nodes, 4 // nodes, **given)))

    def program(self, name: str, text: str) -> None:
        """Write a program that precedes all others of its name on PATH."""
        file = self.folder / "bin" / name
        file.write_text(text)
        file.chmod(0o755)

    def start(self, act: str, restart: int = 0) -> subprocess.Popen:
        (self.folder / "act").write_text(act)
        (self.folder / "starts").write_text(str(restart))
        for file in (self.folder / "ranks", *self.folder.glob("[hc]*_[0-3]")):
            file.unlink(missing_ok=True)
        env = self.env | {"SLURM_RESTART_COUNT": str(restart)}
        with self.said.open("w") as said:
            return subprocess.Popen(["bash", self.file], env=env, stderr=said, process_group=0)

    def run(self, act: str, restart: int = 0, told: bool = False) -> tuple[int, str]:
        """Return the script's exit code and stderr; `told` sends SIGUSR1 once a rank has begun."""
        job = self.start(act, restart)
        try:
            if told:
                self.tell(job, signal.SIGUSR1, self.folder / "ranks")
            return job.wait(50), self.said.read_text()
        finally:  # SLURM also kills the steps of a job that has ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)

    def tell(self, job: subprocess.Popen, number: signal.Signals, when: Path) -> None:
        """Send the script a signal as soon as the file `when` exists."""
        while not when.is_file():
            assert job.poll() is None, self.said.read_text()
            time.sleep(0.02)
        job.send_signal(number)

    def stands(self, state: str, reason: str = "", saved: int | None = None) -> str:
        """Return the line of `act` that writes status.json."""
        uri = None if saved is None else f"s3://bucket/step_9/step_{saved:08d}"
        status = json.dumps({"state": state, "step": 3, "reason": reason, "checkpoint": uri})
        return f"echo '{status}' > {self.run_dir}/status.json\n"

    @property
    def failures(self) -> Path:
        """The file in which the script counts failures."""
        return self.run_dir / "logs" / "failures-12345"

    def requeued(self, job: str = "12345") -> int:
        """Return how often the job was requeued; fail if any other job was."""
        file = self.folder / "scontrol.log"
        lines = file.read_text().splitlines() if file.is_file() else []
        assert set(lines) <= {f"requeue {job}"}
        return len(lines)
