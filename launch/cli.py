"""The `kimi-pretrain` command. Heavy modules are imported inside the commands, so help is instant.

What the user can mend is told in one line (exit code 2); anything else keeps its traceback.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from launch import inspect  # noqa: F401 (its commands)
from launch.data import data
from launch.errors import EXIT_CODE, told_plainly
from launch.job import Job
from launch.options import ConfigOption, JsonOption, Overrides
from launch.plan import plan
from launch.quiet import quiet_libraries
from launch.verify import verify

app = typer.Typer(
    name="kimi-pretrain",
    help="Pre-training of multimodal mixture-of-experts models of the Kimi K2.5 kind.",
    no_args_is_help=True,
    add_completion=False,
    # Paragraphs of the docstrings stay paragraphs, and the examples keep their lines.
    rich_markup_mode="rich",
    # A plain traceback: the pretty one prints local variables, and those may hold secrets.
    pretty_exceptions_enable=False,
)
app.add_typer(data, name="data")
app.add_typer(verify, name="verify")
app.command()(plan)


def end_in_order() -> None:
    """Let SIGTERM unwind the stack like Ctrl-C does, so that what was started is stopped."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def num_cores() -> int:
    """Return the cores this process may use, which in a container can be fewer than there are."""
    return len(os.sched_getaffinity(0))


@app.command()
def train(
    config: ConfigOption,
    overrides: Overrides = None,
    run_dir: Annotated[Path, typer.Option(help="Where the run is kept.")] = Path("runs/train"),
    resume: Annotated[
        str | None, typer.Option(help='Checkpoint folder, or "latest" of the run folder.')
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build it without memory or GPUs, and count.")
    ] = False,
    table: Annotated[
        Path | None,
        typer.Option(help="With --dry-run: a file for every tensor's optimizer and owner."),
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
    rendezvous: Annotated[
        str | None, typer.Option(help="HOST:PORT where the machines meet (several machines only).")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine; must fit the layout.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model, or resume from a checkpoint.

    Starts the processes of the layout by torchrun; inside torchrun or srun it is one of them.

    \b
    kimi-pretrain train --config configs/tiny_cpu.yaml data.root=/data/corpus train.steps=50
    kimi-pretrain train --config tiny_cpu --run-dir runs/a --resume latest
    kimi-pretrain train --config configs/kimi_k25_1t.yaml --dry-run
    kimi-pretrain train --config kimi_k25_1t --dry-run --table tensors.tsv
    """
    end_in_order()
    with told_plainly():
        from kimi_pretrain.config import describe, load_config

        job = Job(config, str(run_dir), tuple(overrides or ()), resume)
        loaded = load_config(config, job.overrides)
        if table is not None:
            check_table(table, dry_run)
        if dry_run:
            print_dry_run(loaded, as_json, table)
            return
        world_size = loaded.layout.world_size()
        if "RANK" in os.environ or world_size == 1:
            from launch.worker import run_job

            run_job(job)
            return
        from launch import supervise, torchrun
        from launch.worker import check_fresh, resume_folder

        resume_folder(job)
        check_fresh(job)
        if loaded.train.vision_weights is not None and resume is None:
            # Here, before many processes find the same mistake.
            from kimi_pretrain.vision_weights import check_vision_weights

            check_vision_weights(loaded)
        nodes = torchrun.spread(world_size, nnodes, rendezvous)
        if nproc not in (None, nodes.processes):
            raise ValueError(
                f"--nproc {nproc} x --nnodes {nnodes} is not the layout's {world_size} processes "
                "(layout.pp x dp x cp x tp)"
            )
        typer.echo(describe(loaded))
        env = torchrun.environment(os.environ, nodes.processes, num_cores())
        code, message = supervise.run(torchrun.command(job, nodes), env, run_dir)
        if message:
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(EXIT_CODE)
        if code:
            raise typer.Exit(code)


def check_table(table: Path, dry_run: bool) -> None:
    """Refuse a table that cannot be written, before the model is built."""
    if not dry_run:
        raise ValueError(f"--table {table} is written by a dry run; add --dry-run")
    if not table.parent.is_dir() or table.is_dir():
        raise ValueError(f"--table {table}: expected a file in a folder that exists")


def print_dry_run(config, as_json: bool, table: Path | None) -> None:
    """Build the model on the meta device; print what it amounts to, and who owns what."""
    quiet_libraries()
    from kimi_pretrain import dry_run
    from kimi_pretrain.config import describe

    typer.echo(describe(config))
    result = dry_run.dry_run(config)
    for line in dry_run.lines(result):
        typer.echo(line)
    if table is not None:
        table.write_text("".join(f"{line}\n" for line in dry_run.table_lines(result)))
    if as_json:
        typer.echo(json.dumps(dry_run.as_json(result)))


@app.command()
def submit(
    config: ConfigOption,
    overrides: Overrides = None,
    run_dir: Annotated[Path, typer.Option(help="On a file system all nodes share.")] = Path(
        "runs/train"
    ),
    gpus_per_node: Annotated[int, typer.Option(min=0, help="0 runs on CPU.")] = 8,
    tasks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node; the number of GPUs unless given.")
    ] = None,
    cpus_per_task: Annotated[int, typer.Option(min=1)] = 8,
    time: Annotated[str, typer.Option(help="Limit, days-hours:minutes:seconds.")] = "1-00:00:00",
    name: Annotated[str, typer.Option(help="Of the job.")] = "kimi-pretrain",
    partition: Annotated[str | None, typer.Option()] = None,
    account: Annotated[str | None, typer.Option()] = None,
    module: Annotated[list[str] | None, typer.Option(help="To `module load`; repeatable.")] = None,
    setup: Annotated[list[str] | None, typer.Option(help="First shell lines; repeatable.")] = None,
    container: Annotated[str | None, typer.Option(help="Image for srun (pyxis).")] = None,
    mount: Annotated[list[str] | None, typer.Option(help="outside:inside; repeatable.")] = None,
    python: Annotated[str, typer.Option(help="Interpreter with this package.")] = sys.executable,
    requeue: Annotated[bool, typer.Option(help="Go on after time limit or node failure.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script only.")] = False,
) -> None:
    """Submit a training job to SLURM: one rank per srun task, requeued when its time is over.

    A requeued job goes on from its last checkpoint: choose checkpoint.every so that several
    fit into --time, because the signal itself does not save.

    \b
    kimi-pretrain submit --config configs/kimi_k25_1t.yaml --dry-run
    kimi-pretrain submit --config my.yaml --partition gpu --run-dir /shared/runs/a train.steps=1000
    """
    with told_plainly():
        from kimi_pretrain.config import load_config
        from launch import slurm

        # "latest" starts from scratch if there is nothing, and is what a requeued job needs.
        path = str(Path(config).resolve()) if Path(config).is_file() else config
        job = Job(path, str(run_dir.resolve()), tuple(overrides or ()), "latest")
        world_size = load_config(config, job.overrides).layout.world_size()
        tasks = tasks_per_node or min(max(1, gpus_per_node), world_size)
        if world_size % tasks:
            raise ValueError(
                f"the layout's {world_size} processes (pp x dp x cp x tp) do not divide over "
                f"nodes of {tasks} tasks; give --tasks-per-node or --gpus-per-node"
            )
        options = slurm.SlurmOptions(
            nodes=world_size // tasks,
            tasks_per_node=tasks,
            gpus_per_node=tasks if gpus_per_node else 0,
            cpus_per_task=cpus_per_task,
            name=name,
            time=time,
            partition=partition,
            account=account,
            requeue=requeue,
            modules=tuple(module or ()),
            setup=tuple(setup or ()),
            container=container,
            mounts=tuple(mount or ()),
            python=python,
        )
        text = slurm.script(job, options)
        if dry_run:
            typer.echo(text, nl=False)
            return
        if shutil.which("sbatch") is None:
            raise ValueError("sbatch is not on PATH; run this on a login node, or use --dry-run")
        run_dir.mkdir(parents=True, exist_ok=True)
        file = run_dir / "job.sbatch"
        file.write_text(text)
        raise typer.Exit(subprocess.run(["sbatch", str(file)], check=False).returncode)


@app.command("eval")
def evaluate(
    config: ConfigOption,
    checkpoint: Annotated[Path, typer.Option(help="Folder of a complete checkpoint.")],
    source: Annotated[str, typer.Option(help="Source to read, under data.root.")],
    overrides: Overrides = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how many characters of held-out pages a checkpoint reads.

    Each page is shown with its own picture, and with another page's: the second number tells what
    can be guessed without looking.

    \b
    kimi-pretrain eval --config runs/demo/config.yaml --checkpoint \\
        runs/demo/checkpoints/step_00000220 --source digits_heldout \\
        data.root=/where/the/corpus/is
    """
    quiet_libraries()
    with told_plainly():
        from kimi_pretrain.config import load_config
        from kimi_pretrain.evaluate import evaluate as measure
        from launch.worker import complete_checkpoint

        folder = complete_checkpoint(checkpoint)
        result = measure(load_config(config, overrides or ()), folder, source)
        if as_json:
            typer.echo(json.dumps(result))
            return
        for key, value in result.items():
            typer.echo(f"{key:32s} {value}")


@app.command()
def demo(
    run_dir: Annotated[Path, typer.Option(help="Where everything is left.")] = Path("runs/demo"),
    config: ConfigOption = "tiny_cpu",
    overrides: Overrides = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole system on real data on this machine: about eight minutes on two cores.

    Starts an S3 server on the loopback address, builds a corpus of images, video and text from
    installed packages, trains a tiny Kimi with four processes, resumes it from the middle and
    compares bit by bit, and reads held-out pages of digits.

    \b
    kimi-pretrain demo
    kimi-pretrain demo --run-dir runs/short train.steps=40 checkpoint.every=20
    """
    end_in_order()
    with told_plainly():
        from launch.demo.run import run_demo

        summary = run_demo(config, run_dir, tuple(overrides or ()))
        if as_json:
            typer.echo(json.dumps(summary))


def main() -> None:
    """Run the command line; the console script's entry."""
    app()


if __name__ == "__main__":
    main()
