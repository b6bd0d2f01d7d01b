"""The `kimi-pretrain` command. Commands import heavy modules when they run, so help is instant.

A user error is one line with exit code 2; any other error keeps its traceback.
"""

import gc
import os
import platform
import signal
import sys
from importlib import metadata
from typing import Annotated

import typer

from kimi_pretrain import __version__
from launch.cli.chain import chain
from launch.cli.checkpoint import checkpoint
from launch.cli.config import config as config_group
from launch.cli.data import data
from launch.cli.demo import demo
from launch.cli.evaluate import evaluate
from launch.cli.plan import plan
from launch.cli.plot import plot
from launch.cli.s3 import s3
from launch.cli.submit import submit
from launch.cli.train import train
from launch.cli.verify import verify
from launch.local.signals import interrupt

app = typer.Typer(
    name="kimi-pretrain",
    help="Pre-training of multimodal mixture-of-experts models of the Kimi K2.5 kind.",
    no_args_is_help=True,
    add_completion=False,
    # Keeps the paragraphs of docstrings and the lines of examples.
    rich_markup_mode="rich",
    # Pretty tracebacks print local variables, which may hold secrets.
    pretty_exceptions_enable=False,
)
app.add_typer(data, name="data")
app.add_typer(verify, name="verify")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(config_group, name="config")
app.add_typer(s3, name="s3")
app.command()(chain)
app.command()(plan)
app.command()(plot)
app.command()(submit)
app.command()(train)
app.command("eval")(evaluate)
app.command()(demo)


def print_version(wanted: bool) -> None:
    """Print the versions that a bug report needs, without importing the packages."""
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
    """Handle the options that precede a command's name."""


def main() -> None:
    """Run the command line; this is the entry point of the console script.

    PYTHONSAFEPATH protects processes that `python -m` starts (torchrun, ranks, writers). Without
    it, a `random.py` in the working folder would shadow the standard library's.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored by the shell
        signal.signal(signal.SIGINT, interrupt)
    try:
        app()
    except SystemExit as end:
        if "kimi_pretrain.engine" in sys.modules:  # an evaluation has process groups
            from launch.local.worker import leave

            leave(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    finally:
        gc.freeze()  # otherwise the interpreter scans every object at exit, which takes 0.2 s


if __name__ == "__main__":
    main()
