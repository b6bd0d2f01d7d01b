"""The `kimi-pretrain plot` command, which plots a finished or unfinished run from its folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kimi_pretrain.tools.run_plots import draw
from launch.cli.options import JsonOption
from launch.local.user_errors import one_line_errors


def plot(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the pictures; RUN unless given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a run: loss, optimizer, vision load, phases of a step.

    Reads metrics.jsonl, and trace.json if the run has reached train.trace_step. The
    run may still be in progress. A finished run has already drawn its own plots
    (train.pictures).

    \b
    kimi-pretrain plot runs/train
    kimi-pretrain plot /shared/runs/a --out pictures/
    """
    with one_line_errors():
        found = draw(run, out or run)
        for name, why in found["left_out"].items():
            typer.echo(f"not drawn: {name}: {why}", err=True)
        if as_json:
            typer.echo(json.dumps(found))
            return
        first, last = found["steps"]
        for file in found["drawn"]:
            typer.echo(f"wrote {file} (steps {first} to {last})")
