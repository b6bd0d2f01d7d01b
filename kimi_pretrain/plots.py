"""Pictures of a run, drawn from what it leaves in its folder: metrics.jsonl and trace.json.

Each function takes plain values and writes one PNG; nothing here needs the run itself. Figures are
built without pyplot, so no display and no global state is involved.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

DPI = 150
RAW, SMOOTH, MUTED = "#b8c4d6", "#1f4e9c", "#6b7280"
NAIVE, ROUND_ROBIN, DEP = "#d97742", "#9aa5b1", "#1f4e9c"
PHASES = (
    "#9aa5b1", "#3b78b8", "#7fb3d5", "#b8562f", "#e0a93b", "#2f8f7f", "#7a5195", "#4b5563",
)  # fmt: skip
LABELS = {
    "naive": ("on the rank that owns the row", NAIVE),
    "round_robin": ("dealt out in turn", ROUND_ROBIN),
    "dep": ("balanced (DEP)", DEP),
}
SMOOTHING_STEPS = 20
# A phase shorter than this part of the step gets no number on its bar: it would not fit.
NUMBERED_SHARE = 0.07


def loss_plot(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss of every step, its running mean, and the learning rate below.

    Args:
        metrics: lines of metrics.jsonl with "step", "loss" and "lr".
        path: PNG to write.

    Raises:
        ValueError: there is no step to draw.

    """
    steps, losses, rates = _columns(metrics, "step", "loss", "lr")
    figure, (top, bottom) = _figure((8, 5.2), 2, 1, height_ratios=(4, 1), sharex=True)
    top.plot(steps, losses, color=RAW, linewidth=1, label="each step")
    top.plot(
        steps,
        running_mean(losses, SMOOTHING_STEPS),
        color=SMOOTH,
        linewidth=2,
        label=f"mean of the last {min(SMOOTHING_STEPS, len(steps))}",
    )
    top.set_ylabel("loss per token (nats)")
    top.set_ylim(0, losses.max() * 1.08)
    top.legend(frameon=False)
    top.set_title(f"Loss: {losses[0]:.2f} at step {steps[0]:g}, {losses[-1]:.2f} at {steps[-1]:g}")
    bottom.plot(steps, rates, color=MUTED, linewidth=1.5)
    bottom.set_ylabel("learning\nrate")
    bottom.set_ylim(bottom=0)
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    bottom.set_xlabel("step")
    _save(figure, path)


def dep_balance_plot(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw how vision patches lie on the ranks, in one typical step and over all steps.

    Args:
        metrics: lines with "step", "patches_per_rank" and "balance"; lines without media are left
            out. The typical step is the one with the median naive imbalance.
        path: PNG to write.

    Raises:
        ValueError: no step has media.

    """
    lines = [m for m in metrics if sum(m["patches_per_rank"]["dep"]) > 0]
    if not lines:
        raise ValueError("no step of this run has vision patches: there is no balance to draw")
    figure, (left, right) = _figure((11, 4.6), 1, 2)
    _patches_of_step(left, sorted(lines, key=lambda m: m["balance"]["naive"])[len(lines) // 2])
    steps = [m["step"] for m in lines]
    for name, (label, colour) in LABELS.items():
        values = np.array([m["balance"][name] for m in lines])
        right.plot(steps, values, color=colour, linewidth=1, alpha=0.3)
        right.plot(
            steps,
            running_mean(values, SMOOTHING_STEPS),
            color=colour,
            linewidth=2,
            label=f"{label}: mean {values.mean():.2f}",
        )
    right.axhline(1, color=MUTED, linewidth=1, linestyle=":")
    worst = max(max(m["balance"].values()) for m in lines)
    right.set_ylim(0.9, 1 + (worst - 1) * 1.4 + 0.1)
    right.set_xlabel("step")
    right.set_ylabel("most loaded rank / mean of ranks")
    right.set_title("Imbalance over the run (1 is perfect)")
    right.legend(frameon=False, fontsize=9)
    _save(figure, path)


def timeline_plot(trace: dict[str, Any], path: Path) -> None:
    """Draw the phases of one step on every rank as bars along the time.

    Args:
        trace: a Chrome trace; "X" events with pid = rank, name = phase, ts and dur in microseconds.
        path: PNG to write.

    Raises:
        ValueError: the trace has no complete event.

    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    if not events:
        raise ValueError("the trace holds no event of a phase: there is nothing to draw")
    ranks = sorted({e["pid"] for e in events})
    begin = min(e["ts"] for e in events)
    span = max(e["ts"] + e["dur"] for e in events) - begin
    # Phases in the order in which they first begin anywhere: the order of the step.
    phases = list(dict.fromkeys(e["name"] for e in sorted(events, key=lambda e: e["ts"])))
    colour = {name: PHASES[number % len(PHASES)] for number, name in enumerate(phases)}
    figure, (axes,) = _figure((11, 1.6 + 0.6 * len(ranks)), 1, 1)
    for event in events:
        start, length = (event["ts"] - begin) / 1e3, event["dur"] / 1e3
        row = ranks.index(event["pid"])
        axes.barh(row, length, left=start, height=0.7, color=colour[event["name"]])
        if event["dur"] > NUMBERED_SHARE * span:
            middle = start + length / 2
            axes.text(middle, row, f"{length:.0f} ms", ha="center", va="center", color="white")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, span / 1e3)
    axes.set_xlabel("milliseconds since the step began")
    axes.set_title("One training step")
    handles = [Patch(color=colour[name], label=name) for name in phases]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    _save(figure, path)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of each value and up to `window - 1` before it; same length."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - window)
    return (sums[last] - sums[first]) / (last - first)


def _patches_of_step(axes: Axes, line: dict[str, Any]) -> None:
    loads = line["patches_per_rank"]
    ranks = np.arange(len(loads["dep"]))
    width = 0.8 / len(LABELS)
    for place, (name, (label, colour)) in enumerate(LABELS.items()):
        at = ranks + (place - (len(LABELS) - 1) / 2) * width
        axes.bar(at, loads[name], width * 0.92, color=colour, label=label)
    mean = float(np.mean(loads["dep"]))
    axes.axhline(mean, color=MUTED, linewidth=1, linestyle=":")
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlabel("rank")
    axes.set_ylabel("vision patches")
    axes.set_title(f"Step {line['step']}: {sum(loads['dep']):,.0f} patches on {len(ranks)} ranks")
    # Headroom, so that the legend does not lie on the bars.
    axes.set_ylim(0, max(max(loads[name]) for name in LABELS) * 1.3)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def _columns(metrics: Sequence[dict[str, Any]], *names: str) -> list[np.ndarray]:
    if not metrics:
        raise ValueError("no step has been recorded yet: there is nothing to draw")
    return [np.array([line[name] for line in metrics], dtype=float) for name in names]


def _figure(size: tuple[float, float], rows: int, cols: int, **how: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, cols, squeeze=False, **how).ravel()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="#e5e7eb", linewidth=0.8)
        one.set_axisbelow(True)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
