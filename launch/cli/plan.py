"""The `kimi-pretrain plan` command: predicts load or step time, calibrates costs, plans memory."""

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cli.options import ConfigOption, JsonOption, Overrides
from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from kimi_pretrain.config import Config
    from kimi_pretrain.tools.text_passes import Traffic


PLANNED, SEARCHED = 8, 2  # steps
NETWORK = 40e9  # bytes/s: 80% of a 400 Gbit/s port per GPU


def plan(
    config: ConfigOption,
    overrides: Overrides = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure what encoder, passes and update cost here.")
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
        float | None,
        typer.Option(help="With --step: bytes a second that a rank sends (40e9).", min=1.0),
    ] = None,
    latency: Annotated[
        float | None, typer.Option(help="With --step: seconds of a small exchange (0).", min=0.0)
    ] = None,
    expert_imbalance: Annotated[
        float | None,
        typer.Option(
            help="With --step: tokens of the busiest rank's experts over the mean (1).", min=1.0
        ),
    ] = None,
    node_network: Annotated[
        float | None,
        typer.Option(help="With --step: bytes a second inside a node (360e9).", min=1.0),
    ] = None,
    device_memory: Annotated[
        float | None,
        typer.Option(help="With --step: bytes a second of a device's memory (2.5e12).", min=1.0),
    ] = None,
    host: Annotated[
        float | None,
        typer.Option(help="With --step: bytes a second from device to host memory (40e9).", min=1),
    ] = None,
    storage: Annotated[
        float | None,
        typer.Option(help="With --step: bytes a second that a node reads, or writes.", min=1.0),
    ] = None,
    save_stall: Annotated[
        float | None,
        typer.Option(help="With --step: seconds that a save stalls, as measured.", min=0.0),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to plan, from the first (8; --search: 2).")
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(min=1.0, help="Bound on the timing of --calibrate.")
    ] = 60.0,
    draw: Annotated[
        Path | None, typer.Option(help="With --step: a picture of the slowest step, .png or .svg.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the JSON object.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the encoder load of each rank, without model or GPUs.

    Plans the first steps exactly like the training, from the indices under data.root,
    for any number of ranks in one process. Shows the encoder's seconds under three
    assignments of media to ranks, the traffic between ranks, and memory. Suggests a
    change where something is the bottleneck.

    --calibrate reads no data. It times the config's encoder, the passes of its
    language model layer by layer, and the update on this machine, and prints the
    lines to paste into the config. The costs are part of the config because every
    rank must compute the same plan from them. Calibrate once, on one device of the
    kind that the run will have. The exchange between ranks is not included.

    --memory prints the memory of the fullest rank of each pipeline stage: weights,
    gradients, optimizer state, activations by kind, the encoder. It names the fullest
    rank, and the single switch that lowers its memory. If this memory exceeds
    train.memory_limit_gib or a common card, it lists settings that together bring it
    under the limit, and the savings of more ranks. A run over the limit is refused.

    --step predicts the seconds of whole steps instead: the pipeline's passes and
    bubbles, the encoder work outside the bubbles, its exchange, gradient sums, the
    update, checkpoint stalls, the loader's bytes and requests, whether storage keeps
    up (--storage, data.requests_per_second), tokens per day, and the bottleneck.
    Passes and update use the costs that --calibrate measured. Without these costs,
    passes are operation counts at dep.flops_per_second, and the update is left out.
    --draw writes a picture of the slowest of these steps with a lane for each stage;
    the JSON object contains its intervals, too. --search also predicts other layouts
    (pp, vpp, cp, tp, ep) of as many ranks, with the memory settings that each needs.
    It lists the ten fastest layouts that fit into train.memory_limit_gib, with the
    settings to paste.

    \b
    kimi-pretrain plan --config configs/kimi_k25_1t.yaml \\
        data.root=s3://bucket/corpus --steps 20
    kimi-pretrain plan --config kimi_k25_1t --memory train.memory_limit_gib=72
    kimi-pretrain plan --config my.yaml --step layout.vpp=4 dep.bubbles=all
    kimi-pretrain plan --config my.yaml --step --draw step.svg
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
        traffic = {
            name: value
            for name, value in (
                ("network", network), ("latency", latency), ("expert_imbalance", expert_imbalance),
                ("node_network", node_network), ("device_memory", device_memory),
                ("host", host), ("storage", storage), ("save_stall", save_stall),
            )
            if value is not None
        }  # fmt: skip
        if traffic and not step:
            given = ", ".join(f"--{name.replace('_', '-')}" for name in traffic)
            raise ValueError(f"{given} without --step: no other plan asks what is sent; give both")
        for option, file in (("--out", out), ("--draw", draw)):
            if file is not None and not file.parent.is_dir():
                raise ValueError(f"{option} {file}: there is no folder {file.parent}")
        if draw is not None:
            _check_drawing(draw, step=step, search=search)
        steps = steps or (SEARCHED if search else PLANNED)
        if memory:
            result = _plan_memory(loaded)
        elif search:
            result = _search(loaded, steps, traffic)
        elif step:
            result = _predict_steps(loaded, steps, traffic, draw)
        else:
            result = _calibrate(loaded, max_seconds) if calibrate else _predict(loaded, steps)
        if out is not None:
            out.write_text(json.dumps(result) + "\n")
        if as_json:
            typer.echo(json.dumps(result))


def _calibrate(config: "Config", max_seconds: float) -> dict[str, Any]:
    from launch.cli.progress import share_bar
    from launch.local.quiet import quiet_libraries

    quiet_libraries()
    from kimi_pretrain.tools import calibrate

    with share_bar("calibrating") as progress:
        encoder = calibrate.calibrate(
            config, max_seconds / 2, lambda share, what: progress(share / 2, what)
        )
        # Imported late, because importing the engine takes seconds and patches torch on a CPU.
        from kimi_pretrain.tools import calibrate_passes

        try:
            passes = calibrate_passes.calibrate_passes(
                config, max_seconds / 2, lambda share, what: progress((1 + share) / 2, what)
            )
        except ValueError:  # the encoder's costs are still valid
            typer.echo("\n".join([*calibrate.lines(encoder), calibrate.yaml_block(encoder)]))
            raise
    for line in (*calibrate.lines(encoder), *calibrate_passes.lines(passes)):
        typer.echo(line)
    typer.echo("\n".join([calibrate.yaml_block(encoder), *calibrate_passes.yaml_lines(passes)]))
    return calibrate.as_json(encoder) | {"language_model": calibrate_passes.as_json(passes)}


def _plan_memory(config: "Config") -> dict[str, Any]:
    from kimi_pretrain.tools import memory_report

    found = memory_report.report(config)
    return _told(memory_report, found)


def _traffic(given: dict[str, float]) -> "Traffic":
    from kimi_pretrain.tools.text_passes import Traffic

    names = {"node_network": "node", "device_memory": "memory"}
    told = {names.get(name, name): value for name, value in given.items()}
    return Traffic(**{"network": NETWORK, **told})


def _check_drawing(file: Path, *, step: bool, search: bool) -> None:
    from kimi_pretrain.tools.step_plot import FORMATS

    if not step:
        raise ValueError(f"--draw {file} without --step: it is a step that is drawn; give both")
    if search:
        raise ValueError(f"--draw {file} with --search: draw a layout that it finds, without it")
    if file.suffix not in FORMATS:
        raise ValueError(f"--draw {file}: expected a name that ends in {' or '.join(FORMATS)}")


def _predict_steps(
    config: "Config", steps: int, traffic: dict[str, float], draw: Path | None
) -> dict[str, Any]:
    from kimi_pretrain.tools import predict_step, step_lanes
    from launch.cli.progress import share_bar

    told = _traffic(traffic)
    with share_bar("planning") as progress:
        plans = predict_step.plan_steps(config, steps, progress)
        found = predict_step.predict_planned(config, plans.plans, told, plans.indices)
        lanes = step_lanes.slowest_step(found, plans.plans)
    result = _told(predict_step, found) | {"drawn": step_lanes.as_json(lanes)}
    if draw is not None:
        from kimi_pretrain.tools.step_plot import step_plot

        step_plot(lanes, draw)
        typer.echo(f"wrote {draw} (step {lanes.step}, the slowest)")
    return result


def _search(config: "Config", steps: int, traffic: dict[str, float]) -> dict[str, Any]:
    from kimi_pretrain.tools import search_layouts
    from launch.cli.progress import share_bar

    told = _traffic(traffic)
    with share_bar("searching") as progress:
        found = search_layouts.search_layouts(config, steps, told, progress)
    return _told(search_layouts, found)


def _predict(config: "Config", steps: int) -> dict[str, Any]:
    from kimi_pretrain.tools import predict
    from launch.cli.progress import share_bar

    with share_bar("planning") as progress:
        found = predict.predict(config, steps, progress)
    return _told(predict, found)


def _told(tool: ModuleType, found: object) -> dict[str, Any]:
    """Print the result of a tool, and return it as plain values."""
    for line in tool.lines(found):
        typer.echo(line)
    return tool.as_json(found)
