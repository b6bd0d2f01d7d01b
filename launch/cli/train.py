"""The `kimi-pretrain train` command: trains or resumes on this machine, or does a dry run."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.job import Job
from launch.local.quiet import quiet_libraries
from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from kimi_pretrain.config import Config


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
    change_data: Annotated[
        bool,
        typer.Option(
            "--change-data", help="With --resume: other shares and new sources from here on."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build the model without memory or GPUs; print sizes.")
    ] = False,
    table: Annotated[
        Path | None,
        typer.Option(help="With --dry-run: file to list every tensor's optimizer and owner in."),
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
        typer.Option(min=0, help="How often to restart from the last checkpoint after a fault."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a model, or resume from a checkpoint.

    Starts the processes of the layout with torchrun; inside torchrun or srun the
    command is one of these processes. Ctrl-C, TERM and USR1 end the training cleanly:
    it finishes the step and saves a checkpoint, so that it can be resumed. A second
    Ctrl-C ends it immediately.

    --change-data switches to the mixture weights and sources in the current
    configuration. Rows already drawn do not change, the packing window in progress is
    finished, and the command reports the first step of the new mixture. Move sources
    that are no longer drawn from to data.past_sources.

    \b
    kimi-pretrain train --config configs/tiny_cpu.yaml data.root=/data/corpus \\
        train.steps=50
    kimi-pretrain train --config tiny_cpu --run-dir runs/a --resume latest \\
        --max-restarts 3
    kimi-pretrain train --config mine.yaml --run-dir runs/a --resume latest \\
        --change-data data.sources='{captions: 0.5, web: 0.5}'
    kimi-pretrain train --config configs/kimi_k25_1t.yaml --dry-run
    kimi-pretrain train --config kimi_k25_1t --dry-run --table tensors.tsv
    """
    with one_line_errors():
        from launch.local.versions import load_pinned

        if change_data and resume is None:
            raise ValueError("--change-data is for a run that goes on: add --resume latest")
        goes_on = None if resume is None else run_dir
        loaded, pinned = load_pinned(config, overrides or (), goes_on, nnodes)
        job = Job(
            *(config, str(run_dir), pinned, resume), or_start=or_start, change_data=change_data
        )
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
    """Print the end of a training as one line of JSON: exit code and status.json."""
    from kimi_pretrain.reliability.status import read_status

    status = read_status(run_dir)
    found = {} if status is None else asdict(status)
    typer.echo(json.dumps({"run_dir": str(run_dir), "exit_code": code, **found}))


def check_table(table: Path, dry_run: bool) -> None:
    """Refuse an unwritable --table file before the model is built."""
    if not dry_run:
        raise ValueError(f"--table {table} is written by a dry run; add --dry-run")
    if not table.parent.is_dir() or table.is_dir():
        raise ValueError(f"--table {table}: expected a file in a folder that exists")


def print_dry_run(config: "Config", as_json: bool, table: Path | None) -> None:
    """Build the model on the meta device; print its sizes; write the tensor table if asked."""
    quiet_libraries()
    from kimi_pretrain.config import describe
    from kimi_pretrain.reliability.preflight import unsaved

    check_data(config)
    typer.echo(describe(config))
    if (notice := unsaved(config)) is not None:
        typer.echo(f"warning: {notice}")
    from kimi_pretrain.tools import dry_run

    result = dry_run.dry_run(config)
    for line in dry_run.lines(result):
        typer.echo(line)
    if table is not None:
        table.write_text("".join(f"{line}\n" for line in dry_run.table_lines(result)))
    if as_json:
        typer.echo(json.dumps(dry_run.as_json(result)))


def check_data(config: "Config") -> None:
    """Check the data of a dry run if this machine has them."""
    from kimi_pretrain.reliability.preflight import check_start, data_is_here

    if data_is_here(config):
        for notice in check_start(config).notices:
            typer.echo(notice)
    else:
        typer.echo(f"data.root={config.data.root} is not on this machine: data are not checked")
