"""The `kimi-pretrain verify` commands, which check that a configuration trains correctly.

`verify dep` compares a step with DEP to the same step without it. `verify resume` compares a run
that was stopped and resumed to an uninterrupted run. Both start jobs on this machine, one at a
time.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.signals import end_in_order
from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from launch.verify.verification import Verification

verify = typer.Typer(help="Prove that a configuration trains right.", no_args_is_help=True)

ShrinkOption = Annotated[
    bool, typer.Option("--shrink", help="Take a small copy of it; says what was changed.")
]
ProcessesOption = Annotated[int, typer.Option(min=1, help="The most that --shrink leaves.")]
SelfTestOption = Annotated[
    bool, typer.Option("--self-test", help="Plant every fault, and see each of them found.")
]


@verify.callback()
def _group() -> None:
    """Prove that a configuration trains correctly."""


@verify.command()
def dep(
    config: ConfigOption,
    overrides: Overrides = None,
    shrink: ShrinkOption = False,
    processes: ProcessesOption = 4,
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
    self_test: SelfTestOption = False,
    keep: Annotated[
        Path | None, typer.Option(help="Empty folder for configurations, gradients and result.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a step with DEP with the same step without DEP and without parallelism.

    Both start from the same weights and run the same first step on the
    configuration's own data. One runs in the processes of its layout, the other in
    a single process with the encoder inside the graph. Every parameter's gradient,
    the loss and the counts must agree up to rounding: the relative error may reach
    1e-10 in float64 and 1e-5 in float32. In bfloat16 it may reach 2e-2, and 2e-1
    for biases and norms. That can hide a small fault, so use train.dtype=float32 if
    possible. With --steps above 1, the limits are ten times as large, because
    updates propagate rounding. A token at a tie between two experts may choose
    either. The reference follows that choice, and the command reports it. All
    processes run on this machine.

    Exit code 0: the steps match, 1: they differ, 2: they could not be compared.

    \b
    kimi-pretrain verify dep --config my.yaml train.dtype=float32
    kimi-pretrain verify dep --config configs/kimi_k25_1t.yaml --shrink \\
        data.root=s3://corpus
    kimi-pretrain verify dep --config my.yaml --shrink --self-test --json
    kimi-pretrain verify dep --config my.yaml --shrink --plant swapped-items
    """
    end_in_order()
    with one_line_errors():
        from launch.verify.dep import VerifyDep

        asked = {"shrink": shrink, "processes": processes, "keep": keep}
        _run(VerifyDep(steps), config, overrides, plant, self_test, as_json, **asked)


@verify.command()
def resume(
    config: ConfigOption,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Of the run that is never stopped.")] = 4,
    stop_after: Annotated[int, typer.Option(min=1, help="Step after which the other is.")] = 2,
    shrink: ShrinkOption = False,
    processes: ProcessesOption = 4,
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
    self_test: SelfTestOption = False,
    keep: Annotated[
        Path | None, typer.Option(help="Empty folder for configurations, runs and result.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a run midway, resume it, and compare it with an uninterrupted run.

    The run stops as a scheduler would stop it: a rank receives USR1, the run saves
    and ends, and new processes resume from the checkpoint. Checkpoints are written
    as the configuration says (asynchronously, to s3:// if checkpoint.place says so),
    but next to the user's own, and are removed at the end. Every number of every
    step, every tensor of model and optimizer, and the loader's state must match bit
    for bit. In another layout the steps must read the same samples, and losses may
    differ by rounding. All processes run on this machine.

    Exit code 0: the runs match, 1: they differ, 2: they could not be compared.

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
    with one_line_errors():
        from launch.verify.resume import VerifyResume, chosen_layout

        kind = VerifyResume(steps, stop_after, chosen_layout(other_layout, layouts))
        asked = {"shrink": shrink, "processes": processes, "keep": keep}
        _run(kind, config, overrides, plant, self_test, as_json, **asked)


def _run(
    kind: "Verification", config: str, overrides: list[str] | None, plant: str | None,
    self_test: bool, as_json: bool, **options: Any,
) -> NoReturn:  # fmt: skip
    from launch.verify.terminal import Terminal
    from launch.verify.verification import chosen_faults, verify

    terminal = Terminal()
    faults = chosen_faults(plant, self_test, kind.faults)
    result = verify(kind, config, overrides or (), faults=faults, tell=terminal.line, **options)
    if plant is not None:
        result = result.with_fault(plant)
    terminal.show(kind, result.as_dict())
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    raise typer.Exit(0 if result.passed else 1)
