"""`kimi-pretrain verify dep`: is a configuration's step with DEP the step without it?

Two jobs are started here, one after the other, and their gradients compared: the user's layout with
the Decoupled Encoder Process, and one process with the encoder inside the graph.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.cli.verify_resume import resume
from launch.local.errors import told_plainly
from launch.local.signals import end_in_order
from launch.verify import jobs as verify_jobs
from launch.verify.dep import verify_dep, with_fault

verify = typer.Typer(help="Prove that a configuration trains right.", no_args_is_help=True)

verify.command()(resume)


@verify.callback()
def _group() -> None:
    """Prove that a configuration trains right."""


@verify.command()
def dep(
    config: ConfigOption,
    overrides: Overrides = None,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Take a small copy of it; says what was changed.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="The most that --shrink leaves.")] = 4,
    steps: Annotated[
        int, typer.Option(min=1, help="To run; losses of all, gradients of the last.")
    ] = 1,
    plant: Annotated[
        str | None,
        typer.Option(
            help="See it fail: doubled-gradient, lost-item, lost-gradient, swapped-items, "
            "wrong-divisor, unequal-sums or wrong-expert."
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant every fault, and see each of them found.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Empty folder for configurations, gradients and result.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a step with DEP with the same step without DEP and without parallelism.

    Both start from the same weights and take the same first step of the
    configuration's own data: one in the processes of its layout, one in a single
    process with the encoder inside the graph. Every parameter's gradient, the
    loss and the counts must agree but for rounding: relative errors of 1e-10 in
    float64 and 1e-5 in float32. In bfloat16 2e-2 are allowed, 2e-1 in biases and
    norms: that can hide a small fault, so take train.dtype=float32 if it can be
    had. With --steps above 1 ten times as much is allowed, because updates carry
    rounding on. A token at a tie between two experts may choose either: the
    reference follows it there, and the command says so. All processes run on this
    machine.

    Exit code 0: the same, 1: not the same, 2: could not be compared.

    \b
    kimi-pretrain verify dep --config my.yaml train.dtype=float32
    kimi-pretrain verify dep --config configs/kimi_k25_1t.yaml --shrink \\
        data.root=s3://corpus
    kimi-pretrain verify dep --config my.yaml --shrink --self-test --json
    kimi-pretrain verify dep --config my.yaml --shrink --plant swapped-items
    """
    end_in_order()
    with told_plainly():
        from kimi_pretrain.verify.faults import FAULTS
        from launch.verify.dep_view import Terminal

        terminal = Terminal()
        result = verify_dep(
            config,
            tuple(overrides or ()),
            shrink=shrink,
            processes=processes,
            steps=steps,
            faults=verify_jobs.chosen_faults(plant, self_test, FAULTS),
            keep=keep,
            tell=terminal.line,
        )
        if plant is not None:
            result = with_fault(result, plant)
        terminal.show(result)
        if as_json:
            typer.echo(json.dumps(result))
        raise typer.Exit(0 if result["passed"] else 1)
