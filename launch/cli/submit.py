"""The `kimi-pretrain submit` command: checks a job, submits it to SLURM, and follows its log.

docs/SLURM.md explains the jobs.
"""

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.store.addresses import check_local
from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.job import LATEST, Job
from launch.local.user_errors import one_line_errors
from launch.slurm import queue as slurm_queue
from launch.slurm import script as slurm
from launch.slurm.options import SlurmOptions, late_watchdog, parse_seeds

if TYPE_CHECKING:
    from kimi_pretrain.config import Config

# Exit code after Ctrl-C: 128 + SIGINT, as in shells.
INTERRUPTED = 130
# Files in the run folder: the configuration of the job, and its SLURM job number.
JOB_CONFIG, JOB = "job.yaml", "slurm_job.json"
PATIENCE_S = 20.0  # limit for store requests: a login node may not reach the store


def submit(
    config: ConfigOption,
    overrides: Overrides = None,
    run_dir: Annotated[Path, typer.Option(help="On a file system that all nodes share.")] = Path(
        "runs/train"
    ),
    resume: Annotated[
        str | None,
        typer.Option(help='"latest" resumes the run of the folder; or a checkpoint or run.'),
    ] = None,
    or_start: Annotated[
        bool,
        typer.Option("--or-start", help="With --resume latest: begin if nothing was ever saved."),
    ] = False,
    change_data: Annotated[
        bool,
        typer.Option("--change-data", help="As of `train`: other shares and sources from here on."),
    ] = False,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="0 runs on CPU.")] = 8,
    tasks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node; the number of GPUs unless given.")
    ] = None,
    cpus_per_task: Annotated[int, typer.Option(min=1)] = 8,
    time: Annotated[str, typer.Option(help="Limit, days-hours:minutes:seconds.")] = "1-00:00:00",
    save_seconds: Annotated[
        int, typer.Option(min=1, help="At least a step and a save; then late ranks are given up.")
    ] = 700,
    name: Annotated[str, typer.Option(help="Of the job.")] = "kimi-pretrain",
    partition: Annotated[str | None, typer.Option()] = None,
    account: Annotated[str | None, typer.Option()] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Further option of sbatch, KEY=VALUE; repeatable.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help='An array, one run for each train.seed: "1,2,3", "0-4".'),
    ] = None,
    after: Annotated[
        list[int] | None, typer.Option(help="Number of a job that must succeed first; repeatable.")
    ] = None,
    module: Annotated[list[str] | None, typer.Option(help="For `module load`; repeatable.")] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help="Shell line run first; repeatable.")
    ] = None,
    container: Annotated[str | None, typer.Option(help="Image for srun (pyxis).")] = None,
    mount: Annotated[list[str] | None, typer.Option(help="outside:inside; repeatable.")] = None,
    python: Annotated[
        str | None, typer.Option(help="Interpreter with this package; in a container python3.")
    ] = None,
    requeue: Annotated[
        bool, typer.Option(help="Requeue after time limit, pre-emption, failures, lost nodes.")
    ] = True,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Failures in a row without a newer checkpoint; then it ends.")
    ] = 3,
    unchecked: Annotated[
        bool,
        typer.Option("--unchecked", help="Skip the checks of data and checkpoint place."),
    ] = False,
    follow: Annotated[
        bool | None, typer.Option(help="Show the log until the end; on a terminal by default.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script only.")] = False,
    parsable: Annotated[
        bool, typer.Option("--parsable", help="Print the job's number and nothing else.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a training job to SLURM, with one rank per srun task, requeued until finished.

    At the time limit, or when SLURM preempts the job, the ranks save a checkpoint and
    the job is requeued. It continues from the newest checkpoint. The configuration is
    copied into the run folder now, so later edits do not change the job.

    \b
    kimi-pretrain submit --config configs/kimi_k25_1t.yaml --dry-run
    kimi-pretrain submit --config my.yaml --partition gpu \\
        --run-dir /shared/runs/a train.steps=1000
    kimi-pretrain submit --config my.yaml --run-dir /shared/runs/sweep --seeds 0-4
    job=$(kimi-pretrain submit --config one.yaml --run-dir /shared/runs/one \\
        --parsable)
    kimi-pretrain submit --config two.yaml --run-dir /shared/runs/two --after $job
    """
    with one_line_errors():
        from launch.local.versions import load_pinned
        from launch.slurm.request import SlurmRequest

        check_local("--run-dir", run_dir)
        folder = run_dir.resolve()
        loaded, _ = load_pinned(config, overrides or (), folder if resume else None)
        request = SlurmRequest(
            gpus_per_node=gpus_per_node,
            tasks_per_node=tasks_per_node,
            cpus_per_task=cpus_per_task,
            time=time,
            save_seconds=save_seconds,
            name=name,
            partition=partition,
            account=account,
            sbatch=sbatch or [],
            module=module or [],
            setup=setup or [],
            container=container,
            mount=mount or [],
            python=python,
            requeue=requeue,
            max_restarts=max_restarts,
        )
        world_size = loaded.layout.world_size()
        options = request.options(world_size, tuple(after or ()), parse_seeds(seeds))
        begin = Begin(resume, or_start, unchecked, change_data)
        if dry_run:
            typer.echo(script_of(loaded, folder, options, begin, dry_run), nl=False)
            return
        number, log = submit_job(loaded, folder, options, begin)
        if parsable or as_json:
            told = {"job": number, "script": str(folder / "job.sbatch"), "log": log}
            typer.echo(number if parsable else json.dumps(told))
            return
        typer.echo(f"job {number}; its log: {log}")
        if sys.stdout.isatty() if follow is None else follow:
            raise typer.Exit(watch(number, log))


@dataclass(frozen=True)
class Begin:
    """Start options of a job; the command has options with the same names."""

    resume: str | None = None
    or_start: bool = False
    unchecked: bool = False
    change_data: bool = False


def submit_job(
    config: "Config", folder: Path, options: SlurmOptions, begin: Begin
) -> tuple[int, str]:
    """Check and submit a job; return its number and the path of its log.

    Args:
        config: configuration of the run; it is copied into the run folder.
        folder: absolute path of the run folder.

    Raises:
        ValueError: the job cannot run, or SLURM refused it.
    """
    text = script_of(config, folder, options, begin)
    slurm_queue.check_slurm()
    if not begin.unchecked:
        check_reachable(config, begin.resume)
    return enqueue(config, folder, options, text)


def enqueue(config: "Config", folder: Path, options: SlurmOptions, text: str) -> tuple[int, str]:
    """Submit a script; write the job number into the run folder; return number and log path.

    Raises:
        ValueError: SLURM refused the job.
    """
    from kimi_pretrain.reliability.run_files import write_whole

    number = slurm_queue.submit(write(folder, config, text, options.seeds))
    write_whole(folder / JOB, json.dumps({"job": number}) + "\n")
    log = slurm.log_file(str(folder / "seed_%a" if options.seeds else folder), options)
    return number, log.replace("%j", str(number)).replace("%A", str(number))


def script_of(
    config: "Config", folder: Path, options: SlurmOptions, begin: Begin, dry_run: bool = False
) -> str:
    """Check a job's folder, and return its script.

    Raises:
        ValueError: the folder cannot be used, or contains nothing to resume from.
    """
    resume, or_start = begin.resume, begin.or_start
    check_folder(folder, options.seeds, resume)
    # This machine can read the run folder, but may not reach a separate checkpoint.place.
    if resume == LATEST and not (config.checkpoint.place and (begin.unchecked or dry_run)):
        check_runs(config, folder, options.seeds, or_start)
    # A requeued job resumes from "latest". If the job was killed before its first save, there is
    # no latest checkpoint. It then starts from the checkpoint that --resume names, or from
    # scratch, unless --resume latest demands a checkpoint.
    other = None if resume in (None, LATEST) else resume
    anew = resume is None or (resume == LATEST and or_start)
    if begin.change_data and resume is None:
        raise ValueError("--change-data is for a run that goes on: add --resume latest")
    where = (str(folder / JOB_CONFIG), str(folder), (), LATEST, other, anew)
    # A requeued job keeps the option, because a data change is not applied twice.
    job = Job(*where, change_data=begin.change_data)
    if warning := late_watchdog(options, config.train.timeout_seconds):
        typer.echo(f"warning: {warning}", err=True)
    return slurm.script(job, options, config.checkpoint.place)


def check_folder(folder: Path, seeds: tuple[int, ...], resume: str | None) -> None:
    """Refuse a run folder that SLURM or the run could not use.

    Raises:
        ValueError: the name is invalid, the folder is a file or not writable, or it holds a run.
    """
    from kimi_pretrain.reliability import run_lock
    from kimi_pretrain.reliability.run_history import check_fresh

    if not re.fullmatch(r"[\w./+=,@-]+", str(folder)) or slurm.SEED in str(folder):
        raise ValueError(
            f"--run-dir {folder}: SLURM's files cannot name it; use letters, digits and ./+=,@-_"
        )
    there = run_lock.check_folder(folder)
    if resume != LATEST:  # even with another checkpoint: the folder's own would be newer
        for one in run_folders(folder, seeds):
            check_fresh(one)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"--run-dir {folder}: cannot write into {there} ({error.strerror})"
        ) from None


def check_runs(config: "Config", folder: Path, seeds: tuple[int, ...], or_start: bool) -> None:
    """Refuse `--resume latest` for runs without a checkpoint.

    An unreachable checkpoint location only causes a warning; the job checks it.

    Raises:
        ValueError: nothing was saved, or the checkpoints are elsewhere.
    """
    from kimi_pretrain.checkpoint.errors import CheckpointError
    from kimi_pretrain.checkpoint.storage_read import open_place
    from kimi_pretrain.reliability.run_history import check_latest

    named = config.checkpoint.place
    places = [slurm.place_of_element(named, seed) for seed in seeds] if named else []
    for number, one in enumerate(run_folders(folder, seeds)):
        place = places[number] if places else named or one / "checkpoints"
        try:
            check_latest(config, one, open_place(place, PATIENCE_S), or_start)
        except CheckpointError as error:  # the nodes may have access that this machine lacks
            told = f"not looked for a checkpoint from here, the job will: {error}"
            typer.echo(f"warning: {told}", err=True)
            return  # each further location would cost the same wait


def check_reachable(config: "Config", resume: str | None) -> None:
    """Check the data and the checkpoint location now, rather than after hours in the queue.

    Raises:
        ValueError: as for `check_start`; suggests --unchecked if this machine may be the cause.
    """
    from data_pipeline.store.open import StoreError
    from kimi_pretrain.checkpoint.errors import CheckpointError
    from kimi_pretrain.reliability.preflight import check_start

    try:
        check_start(config, steps=1 if resume is None else 0, patience=PATIENCE_S)
    except (StoreError, CheckpointError) as error:
        raise ValueError(
            f"{error}; if the nodes reach it and this machine does not, add --unchecked"
        ) from None


def run_folders(folder: Path, seeds: tuple[int, ...]) -> list[Path]:
    """Return the run folder, or one folder per seed of a job array."""
    return [folder / f"seed_{seed}" for seed in seeds] or [folder]


def write(folder: Path, config: "Config", text: str, seeds: tuple[int, ...]) -> Path:
    """Write the configuration and the script into the run folder; return the script's path."""
    from kimi_pretrain.config import dump_config

    for one in run_folders(folder, seeds):
        (one / "logs").mkdir(parents=True, exist_ok=True)
    (folder / JOB_CONFIG).write_text(dump_config(config))
    script = folder / "job.sbatch"
    script.write_text(text)
    return script


def watch(number: int, log: str) -> int:
    """Follow a job until it ends or until Ctrl-C; return the exit code of this command."""
    try:
        found = slurm_queue.follow(
            number, typer.echo, lambda line: typer.echo(f"-- {line}", err=True)
        )
    except KeyboardInterrupt:
        typer.echo(
            f"\njob {number} goes on without this terminal; its log: {log}; to end it: "
            f"scancel {number}",
            err=True,
        )
        return INTERRUPTED
    except RuntimeError as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    return slurm_queue.worst_exit_code(found)
