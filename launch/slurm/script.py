"""Fills in `job.sbatch`, the script of a training job; docs/SLURM.md describes the job's life.

The template is plain bash and contains everything that the script does. Three kinds of lines are
replaced: `#SBATCH @OPTIONS@` by the options of sbatch, `kimi_NAME=` by the value of that name, and
`# @SETUP@` by the setup lines. The setup lines are inserted unchanged, so that one line may open a
construct that a later line closes.
"""

import shlex
from dataclasses import replace
from pathlib import Path

from launch.local.job import Job
from launch.slurm.options import SlurmOptions

TEMPLATE = Path(__file__).with_name("job.sbatch")
# Placeholder for the seed of an array element until the job runs.
SEED = "@SEED@"


def script(job: Job, options: SlurmOptions, place: str | None = None) -> str:
    """Return the complete sbatch script.

    Args:
        job: the training job; with seeds, `run_dir` is the parent folder of all seeds.
        options: options of the SLURM job.
        place: checkpoint location, if it is not in the run folder; needed only with seeds.
    """
    mounts = mounts_with(job.run_dir, options) if options.container else ()
    if options.seeds:
        job = element(job, place)
    values = {
        "kimi_run_dir": job.run_dir,
        "kimi_job": job.argument(),
        "kimi_python": options.python,
        "kimi_nodes": options.nodes,
        "kimi_tasks_per_node": options.tasks_per_node,
        "kimi_cpus_per_task": options.cpus_per_task,
        "kimi_container": options.container or "",
        "kimi_mounts": ",".join(mounts),
        "kimi_requeue": "yes" if options.requeue else "",
        "kimi_max_restarts": options.max_restarts,
        "kimi_stop_seconds": options.stop_seconds,
    }
    filled = {f"{name}=": [f"{name}={shlex.quote(str(value))}"] for name, value in values.items()}
    filled["#SBATCH @OPTIONS@"] = directives(job, options)
    filled["# @SETUP@"] = setup(options)
    template = TEMPLATE.read_text().splitlines()
    assert all(template.count(line) == 1 for line in filled), TEMPLATE
    return "".join(f"{text}\n" for line in template for text in filled.get(line, [line]))


def element(job: Job, place: str | None) -> Job:
    """Return the job of an array element, with its own seed, run folder and checkpoint location."""
    overrides = [*job.overrides, f"train.seed={SEED}"]
    if place is not None:
        overrides.append(f"checkpoint.place={place_of_element(place, SEED)}")
    folder = f"{job.run_dir}/seed_{SEED}"
    return replace(job, run_dir=folder, overrides=tuple(overrides))


def place_of_element(place: str, seed: int | str) -> str:
    """Return the checkpoint location of an array element, below the configured location."""
    return f"{place.rstrip('/')}/seed_{seed}"


def log_file(run_dir: str, options: SlurmOptions) -> str:
    """Return the path of the job's output, with SLURM's % placeholders for job and element."""
    number = "%A" if options.seeds else "%j"
    return f"{run_dir.replace(SEED, '%a')}/slurm-{number}.out"


def directives(job: Job, options: SlurmOptions) -> list[str]:
    """Return the #SBATCH lines; the user's lines come last, so that they override the others."""
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
        # Without this, a job whose predecessor failed would wait forever.
        "kill-on-invalid-dep": "yes" if after else None,
        # The folder must exist at submission: otherwise SLURM fails the job without a message.
        "output": log_file(job.run_dir, options),
        "open-mode": "append",
        # "B:" sends the signal to the script only, not to the ranks.
        "signal": f"B:USR1@{options.signal_seconds}",
    }
    text = [f"--{key}={value}" for key, value in lines.items() if value is not None]
    text.append("--requeue" if options.requeue else "--no-requeue")
    return [f"#SBATCH {line}" for line in (*text, *(f"--{line}" for line in options.directives))]


def setup(options: SlurmOptions) -> list[str]:
    """Return the setup lines, each after a line that keeps its text in `doing` for the log."""
    modules = [f"module load {shlex.quote(name)}" for name in options.modules]
    commands = (*modules, *options.setup)
    return [line for command in commands for line in (f"doing={shlex.quote(command)}", command)]


def mounts_with(folder: str, options: SlurmOptions) -> tuple[str, ...]:
    """Return the container's mounts, plus the run folder unless a mount already contains it."""
    inside = [mount.split(":")[1 if ":" in mount else 0] for mount in options.mounts]
    if any(f"{folder}/".startswith(f"{path.rstrip('/')}/") for path in inside):
        return options.mounts
    return (*options.mounts, f"{folder}:{folder}")
