r"""Writes the sbatch script of a training job: one rank per srun task.

Pure text. Rank by task, not torchrun per node: a signal sent to a torchrun step ends torchrun
itself, while a task is the training process. What the script relies on:

- `SLURM_PROCID`, `SLURM_LOCALID`, `SLURM_NTASKS` become RANK, LOCAL_RANK, WORLD_SIZE.
- Rank 0 may stand on any node, so a first, short step asks where it is; the port follows from the
  job's number and its restart count, so a requeued job never meets the ranks of its past.
- A while before the time limit SLURM sends USR1 to the script, which puts the job back into the
  queue; it goes on from the newest complete checkpoint (`--resume latest`).
"""

import re
import shlex
from dataclasses import dataclass

from launch.job import WORKER, Job

# SLURM may send the signal up to a minute early and checks its timers every half minute.
FIRST_PORT, NUM_PORTS = 20_000, 10_000


@dataclass(frozen=True)
class SlurmOptions:
    """What a cluster wants to know.

    Attributes:
        nodes: number of nodes.
        tasks_per_node: ranks on each node, one per GPU.
        gpus_per_node: GPUs to ask for; 0 asks for none (CPU).
        cpus_per_task: cores for each rank.
        name: of the job.
        time: limit, "days-hours:minutes:seconds".
        partition, account: as the cluster calls them.
        signal_seconds: how long before the time limit the job is put back into the queue.
        requeue: put the job back after the limit and after a node failure.
        modules: `module load` names.
        setup: shell lines run before training, for example to activate an environment.
        container: image for `srun --container-image` (pyxis and enroot).
        mounts: "outside:inside" folders for the container.
        python: interpreter that has this package, inside the container if there is one.

    """

    nodes: int
    tasks_per_node: int
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    name: str = "kimi-pretrain"
    time: str = "1-00:00:00"
    partition: str | None = None
    account: str | None = None
    signal_seconds: int = 300
    requeue: bool = True
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    container: str | None = None
    mounts: tuple[str, ...] = ()
    python: str = "python3"

    def __post_init__(self) -> None:
        counts = ("nodes", "tasks_per_node", "cpus_per_task", "signal_seconds")
        for field in counts:
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.gpus_per_node not in (0, self.tasks_per_node):
            raise ValueError(
                f"gpus_per_node is {self.gpus_per_node} with {self.tasks_per_node} tasks per node; "
                "each task drives one GPU, so give the same number (or 0 for CPU)"
            )
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"job name {self.name!r}: use letters, digits, '.', '_' and '-'")


def script(job: Job, options: SlurmOptions) -> str:
    """Return the whole text of the sbatch script."""
    parts = ["#!/bin/bash", *directives(job, options), "set -euo pipefail", ""]
    parts += [f"module load {shlex.quote(name)}" for name in options.modules]
    parts += options.setup
    parts += rendezvous()
    parts += [
        f"export OMP_NUM_THREADS={options.cpus_per_task}",
        # Since SLURM 22.05 srun does not take this over from sbatch.
        f"export SRUN_CPUS_PER_TASK={options.cpus_per_task}",
        "",
    ]
    parts += requeue_trap() if options.requeue else []
    parts += steps(job, options)
    return "\n".join(parts) + "\n"


def directives(job: Job, options: SlurmOptions) -> list[str]:
    """Return the #SBATCH lines."""
    lines = {
        "job-name": options.name,
        "nodes": options.nodes,
        "ntasks-per-node": options.tasks_per_node,
        "cpus-per-task": options.cpus_per_task,
        "gpus-per-node": options.gpus_per_node or None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        # The folder must exist when sbatch runs: SLURM fails the job without a word otherwise.
        "output": f"{job.run_dir}/slurm-%j.out",
        "open-mode": "append",
    }
    text = [f"#SBATCH --{key}={value}" for key, value in lines.items() if value is not None]
    if options.requeue:
        # "B:" sends the signal to this script only, not to the ranks.
        text += ["#SBATCH --requeue", f"#SBATCH --signal=B:USR1@{options.signal_seconds}"]
    else:
        text += ["#SBATCH --no-requeue"]
    return text


def rendezvous() -> list[str]:
    """Return the lines that set where the ranks meet."""
    return [
        "# Where rank 0 stands, asked with the same distribution of tasks as training has.",
        "MASTER_ADDR=$(srun bash -c 'if [ \"$SLURM_PROCID\" -eq 0 ]; then hostname; fi')",
        "restart=${SLURM_RESTART_COUNT:-0}",
        f"MASTER_PORT=$(({FIRST_PORT} + (SLURM_JOB_ID + 101 * restart) % {NUM_PORTS}))",
        "export MASTER_ADDR MASTER_PORT",
    ]


def requeue_trap() -> list[str]:
    """Return the lines that put the job back into the queue when its time is nearly over."""
    return [
        "requeue() {",
        '  echo "time limit near: job $SLURM_JOB_ID goes back into the queue" >&2',
        # A refusal must not end the script: training is still alive.
        '  scontrol requeue "$SLURM_JOB_ID" || echo "requeue was refused" >&2',
        "}",
        "trap requeue USR1",
        "",
    ]


def steps(job: Job, options: SlurmOptions) -> list[str]:
    """Return the lines that run one rank in each task and pass its exit code on."""
    container = []
    if options.container:
        container = [f"--container-image={options.container}"]
    if options.mounts:
        container += ["--container-mounts=" + ",".join(options.mounts)]
    srun = shlex.join(["srun", "--kill-on-bad-exit=1", *container])
    rank = (
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
        f'LOCAL_WORLD_SIZE={options.tasks_per_node}; exec "$@"'
    )
    training = shlex.join([options.python, "-m", WORKER, job.argument()])
    return [
        "# In the background: bash runs a trap only between commands, and `wait` lets it in.",
        f"{srun} bash -c {shlex.quote(rank)} rank \\",
        f"  {training} &",
        "step=$!",
        'wait "$step" && code=0 || code=$?',
        "# A caught signal ends `wait` early, with a code above 128, while the ranks still run.",
        'while kill -0 "$step" 2>/dev/null; do wait "$step" && code=0 || code=$?; done',
        'exit "$code"',
    ]
