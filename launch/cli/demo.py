"""The `kimi-pretrain demo` command, which runs the whole system on real data on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.store.addresses import check_local
from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.signals import end_in_order
from launch.local.user_errors import one_line_errors


def demo(
    run_dir: Annotated[Path, typer.Option(help="Where everything is left.")] = Path("runs/demo"),
    config: ConfigOption = "tiny_cpu",
    overrides: Overrides = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="Instead: the chain of stages `tiny`, docs/STAGES.md.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the whole system on real data on this machine (about eight minutes on two cores).

    Starts an S3 server on the loopback address and builds a corpus of images, video
    and text from installed packages. Trains a tiny Kimi with four processes, resumes
    the run from its middle, and compares the two bit by bit. Then measures how many
    digits of held-out pages the model reads.

    \b
    kimi-pretrain demo
    kimi-pretrain demo --run-dir runs/short train.steps=40 checkpoint.every=20
    kimi-pretrain demo --stages --run-dir runs/stages
    """
    end_in_order()
    with one_line_errors():
        check_local("--run-dir", run_dir)
        if stages:
            from launch.demo.stages import run_stages

            if code := run_stages("tiny", run_dir, overrides or ()):
                raise typer.Exit(code)
            return
        from launch.demo.run import run_demo

        summary = run_demo(config, run_dir, tuple(overrides or ()))
        if as_json:
            typer.echo(json.dumps(summary))
