"""`kimi-pretrain plan`: predicts encoder load or step time, calibrates costs, plans memory."""

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from kimi_pretrain.config import Config


def plan(
    config: ConfigOption,
    overrides: Overrides = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine and fit dep.cost to it.")
    ] = False,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Plan the memory of every stage; reads no data."),
    ] = False,
    step: Annotated[
        bool, typer.Option("--step", help="Predict the seconds of whole steps, and what binds.")
    ] = False,
    search: Annotated[
        bool,
        typer.Option("--search", help="With --step: the fastest layouts that fit into memory."),
    ] = False,
    network: Annotated[
        float, typer.Option(help="With --step: bytes a second that a rank sends.", min=1.0)
    ] = 40e9,
    steps: Annotated[int, typer.Option(min=1, help="Steps to plan, from the first.")] = 8,
    max_seconds: Annotated[
        float, typer.Option(min=1.0, help="Bound on the timing of --calibrate.")
    ] = 60.0,
    out: Annotated[Path | None, typer.Option(help="File for the JSON object.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict what each rank's encoder will do, without model or GPUs.

    Plans the first steps exactly as the training does, from the indices under
    data.root, for any number of ranks in this one process: seconds of the encoder
    under three ways of assigning media to ranks, what travels between ranks,
    memory, and what to change where something binds.

    With --calibrate it reads no data but times the config's encoder on this
    machine, fits dep.cost to it, and prints the lines to paste into the config.
    The cost model is part of the config because every rank must compute the same
    plan from it: calibrate once, on one device of the kind that the run will
    have.

    With --memory it prints what the fullest rank of each pipeline stage holds:
    weights, gradients, optimizer state, activations by kind, the encoder; which
    rank is fullest, and which single switch lowers that. Where that is over
    train.memory_limit_gib, or over the memory of a common card, it lists which
    settings together bring it under, and what more ranks would spare. A run over
    the limit is refused.

    With --step it predicts the seconds of whole steps instead: the pipeline's passes
    and bubbles, what of the encoder lies outside them, its exchange and gradient sum,
    tokens a day, and what binds. Passes are counted operations at
    dep.flops_per_second; nothing is measured. With --search too it prices other
    pipelines of as many ranks and lists the ten fastest that fit into
    train.memory_limit_gib, with the settings to paste.

    \b
    kimi-pretrain plan --config configs/kimi_k25_1t.yaml \\
        data.root=s3://bucket/corpus --steps 20
    kimi-pretrain plan --config kimi_k25_1t --memory train.memory_limit_gib=72
    kimi-pretrain plan --config my.yaml --step layout.vpp=4 dep.bubbles=all
    kimi-pretrain plan --config my.yaml --step --search train.memory_limit_gib=72
    kimi-pretrain plan --config tiny_cpu --calibrate --max-seconds 30
    kimi-pretrain plan --config my.yaml --calibrate --json --out cost.json
    """
    with one_line_errors():
        from launch.local.versions import load_pinned

        loaded, _ = load_pinned(config, overrides or ())
        asked = {"--memory": memory, "--calibrate": calibrate, "--step": step}
        if sum(asked.values()) > 1:
            given = [option for option, on in asked.items() if on]
            raise ValueError(f"{' and '.join(given)}: give one of them")
        if search and not step:
            raise ValueError("--search without --step: it is steps that are compared; give both")
        if out is not None and not out.parent.is_dir():
            raise ValueError(f"--out {out}: there is no folder {out.parent}")
        if memory:
            result = _plan_memory(loaded)
        elif step:
            result = (_search if search else _predict_steps)(loaded, steps, network)
        else:
            result = _calibrate(loaded, max_seconds) if calibrate else _predict(loaded, steps)
        if out is not None:
            out.write_text(json.dumps(result) + "\n")
        if as_json:
            typer.echo(json.dumps(result))


def _calibrate(config: "Config", max_seconds: float) -> dict[str, Any]:
    from kimi_pretrain.tools import calibrate
    from launch.cli.progress import share_bar

    with share_bar("calibrating") as progress:
        result = calibrate.calibrate(config, max_seconds, progress)
    for line in calibrate.lines(result):
        typer.echo(line)
    typer.echo(calibrate.yaml_block(result))
    return calibrate.as_json(result)


def _plan_memory(config: "Config") -> dict[str, Any]:
    from kimi_pretrain.tools import memory_report

    found = memory_report.report(config)
    return _told(memory_report, found)


def _predict_steps(config: "Config", steps: int, network: float) -> dict[str, Any]:
    from kimi_pretrain.tools import predict_step
    from launch.cli.progress import share_bar

    with share_bar("planning") as progress:
        found = predict_step.predict_steps(config, steps, network, progress)
    return _told(predict_step, found)


def _search(config: "Config", steps: int, network: float) -> dict[str, Any]:
    from kimi_pretrain.tools import search_layouts
    from launch.cli.progress import share_bar

    with share_bar("searching") as progress:
        found = search_layouts.search_layouts(config, steps, network, progress)
    return _told(search_layouts, found)


def _predict(config: "Config", steps: int) -> dict[str, Any]:
    from kimi_pretrain.tools import predict
    from launch.cli.progress import share_bar

    with share_bar("planning") as progress:
        found = predict.predict(config, steps, progress)
    return _told(predict, found)


def _told(tool: ModuleType, found: object) -> dict[str, Any]:
    """Print what a tool found, and return it as plain values."""
    for line in tool.lines(found):
        typer.echo(line)
    return tool.as_json(found)
