"""`kimi-pretrain verify resume`: is a run that was stopped and resumed the run that never was?

Three jobs are started here, one after the other, each in new processes: one that does all steps,
one that is stopped in the middle by a scheduler's signal, and one that goes on from what it saved.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.errors import told_plainly
from launch.local.signals import end_in_order
from launch.verify.jobs import chosen_faults
from launch.verify.resume import verify_resume, with_fault


def resume(
    config: ConfigOption,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Of the run that is never stopped.")] = 4,
    stop_after: Annotated[int, typer.Option(min=1, help="Step after which the other is.")] = 2,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Take a small copy of it; says what was changed.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="The most that --shrink leaves.")] = 4,
    other_layout: Annotated[
        str | None,
        typer.Option(help='Also resume in this one, for example "layout.pp=1 layout.dp=2".'),
    ] = None,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Also resume in one process (or two, if it is one).")
    ] = False,
    plant: Annotated[
        str | None,
        typer.Option(
            help="See it fail: unsaved-rng, loader-off-by-one, lost-momentum, lost-expert-bias, "
            "lost-master, lost-step-count or swapped-states."
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant every fault, and see each of them found.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Empty folder for configurations, runs and result.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a run in the middle, resume it, and compare it with one that was never stopped.

    The stop is a scheduler's: a rank gets USR1, the run saves and ends, and new
    processes go on from the checkpoint. They are written as the configuration
    says (asynchronously, to s3:// where checkpoint.place is), but beside the
    user's own, and removed at the end. Every number of every step, every tensor
    of model and optimizer and the loader's state must be the same bit for bit. In
    another layout the steps must read the same samples, and losses may differ by
    rounding. All processes run on this machine.

    Exit code 0: the same, 1: not the same, 2: could not be compared.

    \b
    kimi-pretrain verify resume --config my.yaml
    kimi-pretrain verify resume --config configs/kimi_k25_1t.yaml --shrink \\
        data.root=s3://corpus
    kimi-pretrain verify resume --config my.yaml --shrink --layouts --self-test \\
        --json
    kimi-pretrain verify resume --config my.yaml --other-layout \\
        "layout.pp=1 layout.dp=4"
    """
    end_in_order()
    with told_plainly():
        from kimi_pretrain.verify.resume_faults import RESUME_FAULTS
        from launch.verify.resume_view import ResumeTerminal

        terminal = ResumeTerminal()
        result = verify_resume(
            config,
            tuple(overrides or ()),
            steps=steps,
            stop_after=stop_after,
            shrink=shrink,
            processes=processes,
            elsewhere=chosen_layout(other_layout, layouts),
            faults=chosen_faults(plant, self_test, RESUME_FAULTS),
            keep=keep,
            tell=terminal.line,
        )
        if plant is not None:
            result = with_fault(result, plant)
        terminal.show(result)
        if as_json:
            typer.echo(json.dumps(result))
        raise typer.Exit(0 if result["passed"] else 1)


def chosen_layout(other_layout: str | None, layouts: bool) -> tuple[str, ...] | None:
    """Return the overrides of the other layout to resume in; () to choose one, None for none.

    Raises:
        ValueError: both options at once, or nothing in the text.
    """
    if other_layout is None:
        return () if layouts else None
    if layouts:
        raise ValueError("--layouts chooses another layout itself; leave out --other-layout")
    if not other_layout.split():
        raise ValueError('--other-layout is empty; give for example "layout.pp=1 layout.dp=2"')
    return tuple(other_layout.split())
