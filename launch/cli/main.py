"""The `kimi-pretrain` command. Heavy modules are imported inside the commands, so help is instant.

What the user can mend is told in one line (exit code 2); anything else keeps its traceback.
"""

import json
import os
import platform
import signal
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.store.addresses import check_local
from kimi_pretrain import __version__
from launch.cli import inspect  # noqa: F401 (its commands)
from launch.cli.checkpoint import checkpoint
from launch.cli.data import data
from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.cli.plan import plan
from launch.cli.plot import plot
from launch.cli.s3 import s3
from launch.cli.submit import submit
from launch.cli.verify import verify
from launch.local.errors import told_plainly
from launch.local.job import Job
from launch.local.quiet import quiet_libraries
from launch.local.signals import end_in_order, interrupt

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
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(s3, name="s3")
app.command()(plan)
app.command()(plot)
app.command()(submit)


def print_version(wanted: bool) -> None:
    """Print the versions that a report of a fault needs, without importing what they are of."""
    if wanted:
        typer.echo(f"kimi-pretrain {__version__}")
        for name in ("torch", "megatron-core"):
            try:
                typer.echo(f"{name} {metadata.version(name)}")
            except metadata.PackageNotFoundError:
                typer.echo(f"{name} is not installed")
        typer.echo(f"python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print versions and end."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command()
def train(
    config: ConfigOption,
    overrides: Overrides = None,
    run_dir: Annotated[Path, typer.Option(help="Where the run is kept.")] = Path("runs/train"),
    resume: Annotated[
        str | None,
        typer.Option(help='Checkpoint or run (folder, s3://), or "latest" of this run.'),
    ] = None,
    or_start: Annotated[
        bool,
        typer.Option("--or-start", help="With --resume latest: begin if nothing was ever saved."),
    ] = False,
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
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="How often to go on from the last checkpoint after a fault."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a model, or resume from a checkpoint.

    Starts the processes of the layout by torchrun; inside torchrun or srun it is
    one of them. Ctrl-C, TERM and USR1 end it in order: the step is finished and
    saved, and it can be resumed. Ctrl-C twice ends it at once.

    \b
    kimi-pretrain train --config configs/tiny_cpu.yaml data.root=/data/corpus \\
        train.steps=50
    kimi-pretrain train --config tiny_cpu --run-dir runs/a --resume latest \\
        --max-restarts 3
    kimi-pretrain train --config configs/kimi_k25_1t.yaml --dry-run
    kimi-pretrain train --config kimi_k25_1t --dry-run --table tensors.tsv
    """
    with told_plainly():
        from kimi_pretrain.config import load_config

        job = Job(config, str(run_dir), tuple(overrides or ()), resume, or_start=or_start)
        loaded = load_config(config, job.overrides)
        if table is not None:
            check_table(table, dry_run)
        if dry_run:
            print_dry_run(loaded, as_json, table)
            return
        from launch.local.start import Machines, start

        code = start(job, loaded, Machines(nnodes, rendezvous, nproc, max_restarts))
        if as_json and os.environ.get("RANK", "0") == "0":
            print_end(run_dir, code)
        if code:
            raise typer.Exit(code)


def print_end(run_dir: Path, code: int) -> None:
    """Print how a training ended, for programs: what its status.json says, as one line."""
    from kimi_pretrain.reliability.status import read_status

    status = read_status(run_dir)
    found = {} if status is None else asdict(status)
    typer.echo(json.dumps({"run_dir": str(run_dir), "exit_code": code, **found}))


def check_table(table: Path, dry_run: bool) -> None:
    """Refuse a table that cannot be written, before the model is built."""
    if not dry_run:
        raise ValueError(f"--table {table} is written by a dry run; add --dry-run")
    if not table.parent.is_dir() or table.is_dir():
        raise ValueError(f"--table {table}: expected a file in a folder that exists")


def print_dry_run(config, as_json: bool, table: Path | None) -> None:
    """Build the model on the meta device; print what it amounts to, and who owns what."""
    quiet_libraries()
    from kimi_pretrain.config import describe

    check_data(config)
    typer.echo(describe(config))
    from kimi_pretrain.tools import dry_run

    result = dry_run.dry_run(config)
    for line in dry_run.lines(result):
        typer.echo(line)
    if table is not None:
        table.write_text("".join(f"{line}\n" for line in dry_run.table_lines(result)))
    if as_json:
        typer.echo(json.dumps(dry_run.as_json(result)))


def check_data(config) -> None:
    """Look at the data of a dry run, which often has none: where it is on this machine."""
    from kimi_pretrain.reliability.preflight import check_start, data_is_here

    if data_is_here(config):
        check_start(config)
    else:
        typer.echo(f"data.root={config.data.root} is not on this machine: data are not checked")


@app.command("eval")
def evaluate(
    config: ConfigOption,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint, or run for its newest.")],
    source: Annotated[str, typer.Option(help="Source to read, under data.root.")],
    overrides: Overrides = None,
    texts: Annotated[bool, typer.Option("--texts", help="Count samples without media.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Look at the first samples.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how many digits of held-out pages a checkpoint reads, or its loss on texts.

    Of a source with media: samples with one image each, and of these the digits
    that are written. Each page is shown with its own picture, and with another
    page's: the second number tells what can be guessed without looking.

    Of a source without media, and with --texts: loss and perplexity over all
    tokens of whole texts that the model is trained to write.

    What was counted, and what was left out and why, is told (docs/METRICS.md).

    \b
    kimi-pretrain eval --config runs/demo/config.yaml --checkpoint \\
        runs/demo/checkpoints/step_00000220 --source digits_heldout \\
        data.root=/where/the/corpus/is
    """
    quiet_libraries()
    with told_plainly():
        from kimi_pretrain.config import load_config
        from kimi_pretrain.tools.evaluate import evaluate as measure

        loaded = load_config(config, overrides or ())
        result = measure(loaded, checkpoint, source, texts=texts, limit=limit)
        if as_json:
            typer.echo(json.dumps(result))
            return
        whys = [f"{number:,} {why}" for why, number in result["left_out"].items()]
        for key, value in (result | {"left_out": ", ".join(whys) or "nothing"}).items():
            typer.echo(f"{key:16s} {'not known' if value is None else value}")


@app.command()
def demo(
    run_dir: Annotated[Path, typer.Option(help="Where everything is left.")] = Path("runs/demo"),
    config: ConfigOption = "tiny_cpu",
    overrides: Overrides = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole system on real data on this machine: about eight minutes on two cores.

    Starts an S3 server on the loopback address, builds a corpus of images, video
    and text from installed packages, trains a tiny Kimi with four processes,
    resumes it from the middle and compares bit by bit, and reads held-out pages
    of digits.

    \b
    kimi-pretrain demo
    kimi-pretrain demo --run-dir runs/short train.steps=40 checkpoint.every=20
    """
    end_in_order()
    with told_plainly():
        check_local("--run-dir", run_dir)
        from launch.demo.run import run_demo

        summary = run_demo(config, run_dir, tuple(overrides or ()))
        if as_json:
            typer.echo(json.dumps(summary))


def main() -> None:
    """Run the command line; the console script's entry.

    What it starts with `python -m` (torchrun, ranks, writers) would otherwise look for modules in
    the working folder first, and take a `random.py` there for the library's.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored by the shell
        signal.signal(signal.SIGINT, interrupt)
    try:
        app()
    except SystemExit as end:
        if "kimi_pretrain.engine" in sys.modules:  # an evaluation has had process groups
            from launch.local.worker import leave

            leave(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


if __name__ == "__main__":
    main()
