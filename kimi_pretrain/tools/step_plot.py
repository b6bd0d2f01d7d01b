"""Plot of a predicted step, for `plan --step --draw FILE`."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from kimi_pretrain.tools.figures import new_figure, save_figure
from kimi_pretrain.tools.plots import PHASES, RANK_INCHES
from kimi_pretrain.tools.predict_step import binding
from kimi_pretrain.tools.step_lanes import (
    BACK,
    BACKWARD,
    BEFORE,
    BEHIND,
    BUBBLE,
    DATA,
    FORWARD,
    INSIDE,
    KINDS,
    OVER,
    SAVE,
    SUM,
    UPDATE,
    Lane,
    StepLanes,
)

FORMATS = (".png", ".svg")
# The colours of a run's timeline; a backward pass is a darker forward pass.
COLOURS = {
    DATA: "#9aa5b1",
    BEFORE: PHASES["2 vision forward"],
    OVER: PHASES["3 hand-over"],
    FORWARD: PHASES["4 backbone"],
    BACKWARD: "#b98a2f",
    INSIDE: "#c2255c",
    BUBBLE: PHASES["4 wait"],
    BACK: PHASES["5 hand-back"],
    BEHIND: PHASES["6 vision backward"],
    SUM: PHASES["6 gradient sum"],
    UPDATE: PHASES["7 update"],
    SAVE: "#111827",
}
# Passes narrower than this share of the step have no borders, which would cover them.
BORDERED_SHARE = 0.004


def step_plot(found: StepLanes, path: Path) -> None:
    """Draw a lane of bars for each stage along the time axis; the title names the bottlenecks.

    Args:
        path: file to write; ends in one of `FORMATS`.
    """
    lanes, step = found.lanes, found.seconds
    span = max(one.end for lane in lanes for one in lane.intervals)
    tall = 1.4 + min(RANK_INCHES, 24 / len(lanes)) * len(lanes)
    figure, (axes,) = new_figure((13, max(tall, 1.4 + 0.24 * len(KINDS))), 1, 1)
    for row, lane in enumerate(lanes):
        _draw_lane(axes, row, lane, span)
    seen = {one.kind for lane in lanes for one in lane.intervals}
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in KINDS if kind in seen]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axes.set_yticks(range(len(lanes)), [f"stage {one.stage}, rank {one.rank}" for one in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, span)
    axes.set_xlabel("seconds since the step began")
    parts = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in binding(step))
    binds = f"beside its passes {parts}" if parts else "nothing beside its passes binds"
    axes.set_title(
        f"Step {found.step}, predicted: {step.total:.4g} s; {binds}\n"
        f"(replica {found.replica}, the slowest)"
    )
    save_figure(figure, path)


def _draw_lane(axes: Axes, row: int, lane: Lane, span: float) -> None:
    for kind in KINDS:
        mine = [one for one in lane.intervals if one.kind == kind]
        bars = [(one.begin, one.end - one.begin) for one in mine]
        wide = [length > BORDERED_SHARE * span for _, length in bars]
        border = 0.4 if all(wide) else 0.0
        axes.broken_barh(
            bars, (row - 0.35, 0.7), facecolor=COLOURS[kind], edgecolor="white", linewidth=border
        )
