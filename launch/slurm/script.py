r"""Writes the sbatch script of a training job: one rank per srun task; docs/SLURM.md shows one.

Pure text. Rank by task, not torchrun per node: a signal sent to a torchrun step ends torchrun
itself, while a task is the training process (`launch.local.worker`). What the script relies on:

- Rank 0 may stand on any node, so a first, short step asks where it is and which port nobody
  listens on there; a requeued job asks again, so it never meets the ranks of its past. On a single
  node they meet in a private folder instead (`launch.local.torchrun` says why).
- A while before the time limit, and when SLURM wants the nodes for others, USR1 comes to the script
  alone ("B:"). It passes the signal to srun, which passes it to every rank; they finish the step,
  save and exit 0; then the script puts the job back into the queue, and where they do not in time.
- TERM (`scancel`, pre-emption without the signal) reaches the ranks from SLURM itself. Whoever sent
  it decides what becomes of the job, so the script only waits.
- srun returns the largest exit code, and that of a rank which it killed is larger than what the
  first one had to say: whether a restart can help stands in `logs/error_rank_N.txt`.
- A lost node: SLURM kills the job and puts it back itself (--requeue).
"""

import shlex
from dataclasses import replace

from launch.local.job import MEETING, WORKER, Job
from launch.slurm.ending import ending, ways_out
from launch.slurm.options import SlurmOptions

RESEND_SECONDS = 3
FIRST_PORT, NUM_PORTS = 20_000, 10_000
# Stands for an array element's seed until the job runs.
SEED = "@SEED@"


def element(job: Job, place: str | None) -> Job:
    """Return what an element of an array of seeds runs: its own seed, run folder and place."""
    overrides = [*job.overrides, f"train.seed={SEED}"]
    if place is not None:
        overrides.append(f"checkpoint.place={place_of_element(place, SEED)}")
    folder = f"{job.run_dir}/seed_{SEED}"
    return replace(job, run_dir=folder, overrides=tuple(overrides))


def place_of_element(place: str, seed: int | str) -> str:
    """Return where an element of an array of seeds saves, below the configured place."""
    return f"{place.rstrip('/')}/seed_{seed}"


def script(job: Job, options: SlurmOptions, place: str | None = None) -> str:
    """Return the whole text of the sbatch script.

    Args:
        job: what to train; with seeds, `run_dir` is the folder of all of them.
        options: of the cluster.
        place: of the checkpoints, where it is not the run folder's; needed with seeds only.

    """
    if options.seeds:
        job = element(job, place)
    parts = ["#!/bin/bash", *directives(job, options)]
    # Not -u yet: what others wrote for modules and environments often reads unset variables.
    parts += ["set -eo pipefail", *folder(job, options), *SIGNALS, *ways_out(options)]
    parts += [*setup(options), "set -u", *_value("job", job.argument(), options), ""]
    parts += rendezvous(options) + steps(job, options) + ending(options)
    return "\n".join(parts) + "\n"


def log_file(run_dir: str, options: SlurmOptions) -> str:
    """Return where SLURM writes the job's output, with its own signs for job (%) and element."""
    number = "%A" if options.seeds else "%j"
    return f"{run_dir.replace(SEED, '%a')}/slurm-{number}.out"


def directives(job: Job, options: SlurmOptions) -> list[str]:
    """Return the #SBATCH lines."""
    after = ":".join(map(str, options.after))
    lines = {
        "job-name": options.name,
        "nodes": options.nodes,
        "ntasks-per-node": options.tasks_per_node,
        "cpus-per-task": options.cpus_per_task,
        "gpus-per-node": options.gpus_per_node or None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "array": ",".join(map(str, options.seeds)) or None,
        "dependency": f"afterok:{after}" if after else None,
        # Otherwise a job whose predecessor failed waits for ever.
        "kill-on-invalid-dep": "yes" if after else None,
        # The folder must exist when sbatch runs: SLURM fails the job without a word otherwise.
        "output": log_file(job.run_dir, options),
        "open-mode": "append",
        # "B:" sends the signal to this script only, not to the ranks.
        "signal": f"B:USR1@{options.signal_seconds}",
    }
    text = [f"--{key}={value}" for key, value in lines.items() if value is not None]
    text.append("--requeue" if options.requeue else "--no-requeue")
    return [f"#SBATCH {line}" for line in (*text, *(f"--{line}" for line in options.directives))]


def folder(job: Job, options: SlurmOptions) -> list[str]:
    """Return the lines that say where the run is, by a name that no setup command uses as well."""
    told = ["# An element of the array: its number is its seed."] if options.seeds else []
    return ["", *told, *_value("kimi_run_dir", job.run_dir, options), ""]


def _value(name: str, value: str, options: SlurmOptions) -> list[str]:
    lines = [f"{name}={shlex.quote(value)}"]
    if options.seeds:
        lines += [f"{name}=${{{name}//{SEED}/$SLURM_ARRAY_TASK_ID}}"]
    return lines


def setup(options: SlurmOptions) -> list[str]:
    """Return the lines that run before the ranks; `doing` says which of them has failed."""
    lines = [
        'doing="mkdir or rm in $kimi_run_dir/logs"',
        'mkdir -p "$kimi_run_dir/logs"',
        'rm -f "$kimi_run_dir"/logs/error_rank_*.txt',
        'say "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"',
        f"export OMP_NUM_THREADS={options.cpus_per_task}",
        # What torchrun tells its ranks, where this was submitted by one of them: to these, they
        # would have been restarted.
        "unset ${!TORCHELASTIC_*}",
        # A random.py in the working folder is not the library's.
        "export PYTHONSAFEPATH=1",
        # Since SLURM 22.05 srun does not take this over from sbatch.
        f"export SRUN_CPUS_PER_TASK={options.cpus_per_task}",
    ]
    modules = [f"module load {shlex.quote(name)}" for name in options.modules]
    for command in (*modules, *options.setup):
        lines += [f"doing={shlex.quote(command)}", command]
    return [*lines, "doing='the script itself'"]


SIGNALS = [
    'say() { echo "[$(date +%T)] job $SLURM_JOB_ID: $*" >&2; }',
    "",
    "# The first signal says why the job stops. USR1 goes on to the ranks through srun; TERM they",
    "# have from SLURM.",
    "told= step=",
    "hear() {",
    "  told=${told:-$1}",
    '  say "got $1: the ranks finish their step, save and stop"',
    "}",
    "trap 'hear USR1' USR1",
    "trap 'hear TERM' TERM",
    "",
]


def rendezvous(options: SlurmOptions) -> list[str]:
    """Return the lines that find out where the ranks meet."""
    if meets_in_folder(options):
        return [
            "# All on this node: in a folder that nobody else can open, and no port.",
            f"{MEETING}=$(mktemp -d) MASTER_ADDR=localhost",
            f"export {MEETING}",
            "",
        ]
    return [
        f"unset {MEETING}",
        "# Where rank 0 stands, and a port that nobody listens on there; asked with the same",
        "# distribution of tasks as training has.",
        f"export FIRST_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))",
        "read -r MASTER_ADDR MASTER_PORT < <(srun --overlap bash -c '",
        '  [ "$SLURM_PROCID" -eq 0 ] || exit 0',
        "  port=$FIRST_PORT",
        "  while (exec 3<>/dev/tcp/127.0.0.1/$port) 2>/dev/null; do port=$((port + 1)); done",
        '  echo "$(hostname) $port"\') || true',
        "export MASTER_ADDR MASTER_PORT",
        "",
    ]


def meets_in_folder(options: SlurmOptions) -> bool:
    """Whether the ranks meet in a folder of the node; a container would not see it."""
    return options.nodes == 1 and options.container is None


def steps(job: Job, options: SlurmOptions) -> list[str]:
    """Return the lines that run one rank in each task, and wait for all of them."""
    container = []
    if options.container:
        container = [f"--container-image={options.container}"]
        inside = [mount.split(":")[1 if ":" in mount else 0] for mount in options.mounts]
        mounts = list(options.mounts)
        folder = job.run_dir.replace(f"/seed_{SEED}", "")
        if not any(f"{folder}/".startswith(f"{path.rstrip('/')}/") for path in inside):
            mounts.append(f"{folder}:{folder}")
        container += ["--container-mounts=" + ",".join(mounts)]
    srun = shlex.join(["srun", "--kill-on-bad-exit=1", *container])
    rank = (
        # USR1 would end a process that does not know it yet; ignored, it comes again.
        'trap "" USR1; '
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
        f'LOCAL_WORLD_SIZE={options.tasks_per_node}; exec "$@"'
    )
    give_up = f'    if [ "$SECONDS" -ge {options.stop_seconds} ]; then late=1; break; fi'
    return [
        "code=1 late=",
        'if [ -n "$MASTER_ADDR" ] && [ -z "$told" ]; then',
        "  # In the background: bash runs a trap only between commands, and `wait` lets it in.",
        f"  {srun} bash -c {shlex.quote(rank)} rank \\",
        f'    {shlex.quote(options.python)} -m {WORKER} "$job" &',
        "  step=$!",
        "  # A trap ends `wait` early, while the ranks still run.",
        '  while [ "$told" != USR1 ] && kill -0 "$step" 2>/dev/null; do wait "$step" || true; done',
        "  # Again and again: srun may not have been ready, and to the ranks it means the same.",
        "  SECONDS=0",
        '  while kill -USR1 "$step" 2>/dev/null; do',
        # Without a requeue there is nothing better than to wait for the save.
        *([give_up] if options.requeue else []),
        f"    sleep {RESEND_SECONDS}",
        "  done",
        "  # Bash remembers the exit code. Ranks that are late end with the requeue.",
        '  if [ -z "$late" ]; then wait "$step" && code=0 || code=$?; fi',
        *([f'  rm -rf "${MEETING}"'] if meets_in_folder(options) else []),
        "fi",
        "",
    ]
