"""Plots of a run, drawn from metrics.jsonl and trace.json in its folder.

Each function takes plain values and writes one PNG; none needs the run itself.
"""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from kimi_pretrain.dep.step_bubbles import FILLED, MEASURED
from kimi_pretrain.tools.figures import DPI, MUTED, ink_on, new_figure, save_figure

RAW, SMOOTH = "#b8c4d6", "#1f4e9c"
NAIVE, ROUND_ROBIN, DEP = "#d97742", "#9aa5b1", "#1f4e9c"
EXPOSED = "#c2255c"
CLIPPED = "#c2255c"
# RMS of Muon's update: 0.2 if all singular values were one; Newton-Schulz leaves them between 0.7
# and 1.2, and 0.17 is typical.
MUON_RMS = (0.16, 0.2)
# AdamW begins at 1; a higher axis limit would flatten the other curves.
LARGEST_RMS = 0.6
# Blue: forward phases of the media; green and purple: backward phases. Other phases use OTHERS.
PHASES = {
    "1 wait for data": "#d5d9e0",
    "prepare": "#9aa5b1",
    "2 vision forward": "#2563a8",
    "3 hand-over": "#7fb3d5",
    "4 backbone": "#e7b85c",
    "4 wait": "#fbf3e0",
    "5 hand-back": "#8fcabd",
    "6 vision backward": "#2f8f7f",
    "6 gradient sum": "#7a5195",
    "7 update": "#4b5563",
}
OTHERS = ("#3b78b8", "#b8562f", "#e0a93b", "#2f8f7f", "#7a5195", "#4b5563")
LABELS = {
    "naive": ("on the rank that owns the row", NAIVE),
    "round_robin": ("dealt out in turn", ROUND_ROBIN),
    "dep": ("balanced (DEP)", DEP),
}
SMOOTHING_STEPS = 20
# Maximum height of a row in the memory panel.
PEAK_INCHES = 0.4
# Pieces of work in bubbles closer together than this share of the step are drawn as one bar.
NEAR_SHARE = 0.0005
# Maximum height of a timeline row; the labels with seconds of bubbles only fit at this height.
RANK_INCHES = 0.6
# A phase shorter than this share of the step gets no number on its bar, because it would not fit.
NUMBERED_SHARE = 0.07


def loss_plot(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss of every step, its running mean, and the learning rate below.

    Args:
        metrics: lines of metrics.jsonl with "step", "loss" and "lr".

    Raises:
        ValueError: there is no step to draw.
    """
    steps, losses, rates = _columns(metrics, "step", "loss", "lr")
    figure, (top, bottom) = new_figure((8, 5.2), 2, 1, height_ratios=(4, 1), sharex=True)
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
    save_figure(figure, path)


def losses_plot(
    metrics: Sequence[dict[str, Any]], path: Path, heldout: Sequence[dict[str, Any]] = ()
) -> None:
    """Draw the loss by source and, below, by the token's position in its document.

    The curves are means over the last steps, weighted by tokens; held-out losses are joined points.

    Args:
        metrics: lines with "step", "loss_by_source", "loss_tokens_by_source" and the same two
            by position; lines without them are skipped.
        heldout: lines of heldout.jsonl, with the same names.

    Raises:
        KeyError: no line has these names.
        ValueError: no token was trained on.
    """
    lines = [line for line in metrics if "loss_by_source" in line]
    if not lines:
        raise KeyError("loss_by_source")
    panels = {"source": (4, "loss per token (nats)"), "position": (2, "by place\nin the document")}
    shape = {"height_ratios": [height for height, _ in panels.values()], "sharex": True}
    figure, axes = new_figure((9, 7), len(panels), 1, **shape)
    for one, (what, (_, label)) in zip(axes, panels.items(), strict=True):
        names = [*lines[-1][f"loss_by_{what}"]]
        names += [n for line in heldout[-1:] for n in line[f"loss_by_{what}"] if n not in names]
        colours = {name: (*OTHERS, EXPOSED, MUTED)[at % 8] for at, name in enumerate(names)}
        drawn = _curves(one, lines, what, colours, SMOOTHING_STEPS, linewidth=1.6)
        drawn += _curves(one, heldout, what, colours, 1, marker="o", markersize=4, linestyle="--")
        if not drawn:
            raise ValueError("no token of this run was trained on: there is no loss to draw")
        one.set_ylabel(label)
        one.legend(frameon=False, fontsize=8, ncols=4)
    axes[0].set_title(f"Loss by source, mean of the last {min(SMOOTHING_STEPS, len(lines))} steps")
    axes[-1].set_xlabel("step")
    save_figure(figure, path)


def _curves(
    axes: Axes,
    lines: Sequence[dict[str, Any]],
    what: str,
    colours: dict[str, str],
    window: int,
    **style: Any,
) -> int:
    """Draw the losses by source or by position; return the number of curves."""
    drawn, kind = 0, "held out: " if "marker" in style else ""
    steps = np.array([line["step"] for line in lines])
    for name, colour in colours.items():
        tokens = [line[f"loss_tokens_by_{what}"].get(name, 0) for line in lines]
        means = [line[f"loss_by_{what}"].get(name) for line in lines]
        # A step whose loss was not finite counts as a step without tokens.
        tokens = np.array([n if mean is not None else 0 for n, mean in zip(tokens, means)])
        if not tokens.any():
            continue
        sums = running_mean(tokens * np.array([mean or 0.0 for mean in means]), window)
        counts = running_mean(tokens.astype(float), window)
        seen = counts > 0
        axes.plot(steps[seen], sums[seen] / counts[seen], color=colour, label=kind + name, **style)
        drawn += 1
    return drawn


def dep_balance_plot(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the encoder's work per rank, in one typical step and over all steps.

    The work is drawn in patches and in predicted seconds, which the assignment balances.

    Args:
        metrics: lines with "step", "patches_per_rank" and "predicted_seconds_per_rank"; lines
            without media are left out. If some lines have no seconds, only patches are drawn. The
            typical step is the one with the median naive imbalance.

    Raises:
        ValueError: no step has media.
    """
    lines = [m for m in metrics if sum(m["patches_per_rank"]["dep"]) > 0]
    if not lines:
        raise ValueError("no step of this run has vision patches: there is no balance to draw")
    units = {"patches_per_rank": "vision patches"}
    work = "patches_per_rank"
    if all("predicted_seconds_per_rank" in m for m in lines):
        work = "predicted_seconds_per_rank"
        units[work] = "predicted seconds"
    figure, (*steps_of, right) = new_figure((4 + 4.5 * len(units), 4.6), 1, 1 + len(units))
    typical = sorted(lines, key=lambda m: _imbalance(m, work)["naive"])[len(lines) // 2]
    for axes, (key, unit) in zip(steps_of, units.items(), strict=True):
        _loads_of_step(axes, typical, key, unit)
    steps = [m["step"] for m in lines]
    for name, (label, colour) in LABELS.items():
        values = np.array([_imbalance(m, work)[name] for m in lines])
        right.plot(steps, values, color=colour, linewidth=1, alpha=0.3)
        right.plot(
            steps,
            running_mean(values, SMOOTHING_STEPS),
            color=colour,
            linewidth=2,
            label=f"{label}: mean {values.mean():.2f}",
        )
    right.axhline(1, color=MUTED, linewidth=1, linestyle=":")
    worst = max(max(_imbalance(m, work).values()) for m in lines)
    right.set_ylim(0.9, 1 + (worst - 1) * 1.4 + 0.1)
    right.set_xlabel("step")
    right.set_ylabel("most loaded rank / mean of ranks")
    right.set_title(f"Imbalance in {units[work]} (1 is perfect)")
    right.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def timeline_plot(trace: dict[str, Any], path: Path) -> None:
    """Draw the phases of one step on every rank as bars along the time axis.

    The intervals that the step would save without the encoder are shaded and labelled with their
    length. A side panel shows the peak memory of any rank in each phase, if it was measured. Vision
    work in bubbles and the remaining waits are drawn inside the backbone's bar, with their seconds
    next to the rank's name.

    Args:
        trace: a Chrome trace; "X" events with pid = rank, name = phase, ts and dur in microseconds.
            Category "exposed" marks the intervals above, "bubble" the sections inside the backbone.
            The args hold "peak GiB", "first stage" and the seconds of `MEASURED`.

    Raises:
        ValueError: the trace has no complete event of a phase.
    """
    complete = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    inside = [e for e in complete if e.get("cat") == "bubble"]
    events = [e for e in complete if e.get("cat") not in ("exposed", "bubble")]
    if not events:
        raise ValueError("the trace holds no event of a phase: there is nothing to draw")
    ranks = sorted({e["pid"] for e in events})
    # Phases sorted by their first start on any rank, which is their order in the step.
    begun = sorted([*events, *inside], key=lambda e: e["ts"])
    phases = list(dict.fromkeys(e["name"] for e in begun))
    colours = {
        name: PHASES.get(name, OTHERS[number % len(OTHERS)]) for number, name in enumerate(phases)
    }
    tall = max(1.4 + min(RANK_INCHES, 24 / len(ranks)) * len(ranks), 1.4 + 0.24 * len(phases))
    if any("peak GiB" in e.get("args", {}) for e in events):
        figure, (left, right) = new_figure((13, tall), 1, 2, width_ratios=(4, 1))
        _peaks(right, [*events, *inside], colours)
    else:
        figure, (left,) = new_figure((11, tall), 1, 1)
        handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
        left.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    around = {e["name"] for e in events if FILLED in e.get("args", {})}
    _bars(left, events, ranks, colours, around)
    _inside(left, inside, events, ranks, colours)
    _exposed(left, [e for e in complete if e.get("cat") == "exposed"], events)
    save_figure(figure, path)


def muonclip_plot(
    metrics: Sequence[dict[str, Any]], path: Path, threshold: float | None = None
) -> None:
    """Draw each layer's largest attention logit, the number of clipped heads, and update sizes.

    Args:
        metrics: lines of metrics.jsonl with "step", "max_logits", "clipped_heads", "update_rms" and
            "skipped_steps".
        threshold: of QK-Clip, drawn as a horizontal line; None if it is off.

    Raises:
        ValueError: there is no step to draw.
    """
    steps, clipped, skipped = _columns(metrics, "step", "clipped_heads", "skipped_steps")
    shape = {"height_ratios": (4, 1, 2), "sharex": True}
    figure, (top, middle, bottom) = new_figure((9, 7.6), 3, 1, **shape)
    # None, for a step that saw no document, becomes a gap in the curve.
    logits = np.array([line["max_logits"] for line in metrics], dtype=float)
    _logits_of_layers(top, steps, logits, threshold)
    middle.vlines(steps, 0, clipped, color=CLIPPED, linewidth=1.5)
    middle.yaxis.get_major_locator().set_params(integer=True)
    middle.set_ylabel("clipped\nheads")
    middle.set_ylim(0, max(1, clipped.max()) * 1.05)
    bottom.axhspan(*MUON_RMS, color=SMOOTH, alpha=0.18, linewidth=0)
    groups = sorted({group for line in metrics for group in line["update_rms"]})
    for number, group in enumerate(groups):
        sizes = [line["update_rms"].get(group, np.nan) for line in metrics]
        colour = (*OTHERS, EXPOSED, MUTED, RAW, "#000000")[number % (len(OTHERS) + 4)]
        bottom.plot(steps, sizes, color=colour, linewidth=1.4, label=group)
    bottom.set_ylabel("RMS of updates\nbefore the rate")
    bottom.set_ylim(0, LARGEST_RMS)
    bottom.set_xlabel("step")
    if groups:
        bottom.legend(frameon=False, fontsize=8, ncols=5)
    if skipped[-1]:
        bottom.set_title(f"steps skipped: {skipped[-1]:.0f}", fontsize=9, loc="right")
    save_figure(figure, path)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of each value and up to `window - 1` before it; same length."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(0, last - window)
    return (sums[last] - sums[first]) / (last - first)


def _logits_of_layers(
    axes: Axes, steps: np.ndarray, logits: np.ndarray, threshold: float | None
) -> None:
    """Draw one curve per layer, from light (the first) to dark, and the threshold as a line."""
    layers = logits.shape[1]
    first, last = (np.array(to_rgb(colour)) for colour in (RAW, SMOOTH))
    for layer in range(layers):
        part = layer / max(1, layers - 1)
        label = f"layer {layer}" if layer in (0, layers - 1) else None
        colour = tuple(first + part * (last - first))
        axes.plot(steps, logits[:, layer], color=colour, linewidth=1.2, label=label)
    if threshold is not None:
        axes.axhline(threshold, color=CLIPPED, linewidth=1.4, linestyle="--", label="threshold")
    axes.set_ylabel("largest attention logit")
    seen = logits[np.isfinite(logits)]
    largest = f": at most {seen.max():.4g}" if len(seen) else ""
    axes.set_title(f"Largest attention logit of each layer{largest}")
    axes.legend(frameon=False, fontsize=9)


def _imbalance(line: dict[str, Any], work: str) -> dict[str, float]:
    """Return the load of the busiest rank over the mean of ranks, for each assignment."""
    loads = line[work]
    return {name: max(loads[name]) / float(np.mean(loads[name])) for name in LABELS}


def _loads_of_step(axes: Axes, line: dict[str, Any], work: str, unit: str) -> None:
    loads = line[work]
    ranks = np.arange(len(loads["dep"]))
    width = 0.8 / len(LABELS)
    for place, (name, (label, colour)) in enumerate(LABELS.items()):
        at = ranks + (place - (len(LABELS) - 1) / 2) * width
        axes.bar(at, loads[name], width * 0.92, color=colour, label=label)
    mean = float(np.mean(loads["dep"]))
    axes.axhline(mean, color=MUTED, linewidth=1, linestyle=":")
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlabel("rank")
    axes.set_ylabel(unit)
    axes.set_title(f"Step {line['step']}: {unit} on {len(ranks)} ranks")
    # Headroom keeps the legend off the bars.
    axes.set_ylim(0, max(max(loads[name]) for name in LABELS) * 1.3)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def _span_of(events: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the start of the step and its duration over all ranks, both in microseconds."""
    begin = min(e["ts"] for e in events)
    return begin, max(e["ts"] + e["dur"] for e in events) - begin


def _bars(
    axes: Axes,
    events: Sequence[dict[str, Any]],
    ranks: list[int],
    colours: dict[str, str],
    around: Set[str],
) -> None:
    """Draw a bar for each event; print its length unless `around` names it as holding others."""
    begin, span = _span_of(events)
    for event in events:
        start, length = (event["ts"] - begin) / 1e3, event["dur"] / 1e3
        row, colour = ranks.index(event["pid"]), colours[event["name"]]
        axes.barh(row, length, left=start, height=0.7, color=colour)
        if event["dur"] > NUMBERED_SHARE * span and event["name"] not in around:
            middle = start + length / 2
            ink = ink_on(colour)
            axes.text(middle, row, f"{length:.0f} ms", ha="center", va="center", color=ink)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, span / 1e3)
    axes.set_xlabel("milliseconds since the step began")


def _inside(
    axes: Axes,
    pieces: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    ranks: list[int],
    colours: dict[str, str],
) -> None:
    """Draw work in bubbles and waits inside the bars, with their seconds next to the rank names."""
    begin, span = _span_of(events)
    for row, rank in enumerate(ranks):
        mine = sorted((e for e in pieces if e["pid"] == rank), key=lambda e: e["ts"])
        for name, start, end in joined(mine, NEAR_SHARE * span):
            where, length = (start - begin) / 1e3, (end - start) / 1e3
            axes.barh(row, length, left=where, height=0.42, color=colours[name], linewidth=0)
    of_rank = {e["pid"]: e["args"] for e in events if FILLED in e.get("args", {})}
    if of_rank and len(ranks) * RANK_INCHES <= 24:
        labels = [
            f"rank {rank}\n" + "\n".join(f"{kind} {of_rank[rank][kind]:.2f} s" for kind in MEASURED)
            if rank in of_rank
            else f"rank {rank}"
            for rank in ranks
        ]
        axes.set_yticks(range(len(ranks)), labels, fontsize=8)


def joined(pieces: Sequence[dict[str, Any]], near: float) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of events in time order; close events of one name are merged."""
    found: list[tuple[str, float, float]] = []
    for piece in pieces:
        name, start = piece["name"], piece["ts"]
        if found and found[-1][0] == name and start - found[-1][2] <= near:
            start = found.pop()[1]
        found.append((name, start, piece["ts"] + piece["dur"]))
    return found


def _exposed(
    axes: Axes, stretches: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]
) -> None:
    """Shade and bracket the exposed encoder time; put its share of the step into the title."""
    begin, span = _span_of(events)
    title = f"One training step, {span / 1e3:.0f} ms"
    total = sum(e["dur"] for e in stretches)
    if stretches:
        title += f"; the encoder costs {total / span:.1%} of it"
    axes.set_title(title, pad=24 if stretches else 6)
    over, height = axes.get_xaxis_transform(), axes.bbox.height / DPI
    top = 1 + 0.1 / height  # a tenth of an inch above the bars for any number of ranks
    for event in stretches:
        start, end = ((event["ts"] - begin + more) / 1e3 for more in (0, event["dur"]))
        axes.axvspan(start, end, color=EXPOSED, alpha=0.12, zorder=0, linewidth=0)
        axes.plot(
            *((start, start, end, end), (1.0, top, top, 1.0)),
            **{"color": EXPOSED, "linewidth": 1.2, "transform": over, "clip_on": False},
        )
        # The two labels extend outwards from the step's middle, so they never overlap.
        side = "left" if (start + end) / 2 < span / 2e3 else "right"
        at = start if side == "left" else end
        label = f"exposed {end - start:.0f} ms"
        axes.text(
            at, top + 0.06 / height, label, color=EXPOSED, fontsize=9, ha=side, transform=over
        )


def _peaks(axes: Axes, events: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    """Draw the peak memory of any rank in each phase; its labels are also the legend."""
    measured = [e for e in events if "peak GiB" in e.get("args", {})]
    for row, (name, colour) in enumerate(colours.items()):
        of_phase = [e["args"] for e in measured if e["name"] == name]
        axes.barh(row, 0, color=colour)  # reserves a row and a label for every phase
        if not of_phase:
            within = any(e["name"] == name and e.get("cat") == "bubble" for e in events)
            words = " inside the backbone" if within else " not measured"
            axes.text(0, row, words, va="center", fontsize=8, color=MUTED)
            continue
        axes.barh(row, max(a["peak GiB"] for a in of_phase), height=0.7, color=colour)
        if first := [a["peak GiB"] for a in of_phase if a.get("first stage")]:
            axes.plot([max(first)] * 2, [row - 0.42, row + 0.42], color="black", linewidth=1.6)
    axes.set_yticks(range(len(colours)), list(colours))
    for label, colour in zip(axes.get_yticklabels(), colours.values(), strict=True):
        swatch = {"facecolor": colour, "edgecolor": "none", "boxstyle": "square,pad=0.15"}
        label.set(fontsize=9, color=ink_on(colour))
        label.set_bbox(swatch)
    rows = axes.bbox.height / DPI / PEAK_INCHES  # with many ranks, the lower part stays empty
    axes.set_ylim(max(float(len(colours)), rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(left=0)
    axes.set_xlabel("GiB; line: first stage")
    axes.set_title("Most memory of a rank")


def _columns(metrics: Sequence[dict[str, Any]], *names: str) -> list[np.ndarray]:
    if not metrics:
        raise ValueError("no step has been recorded yet: there is nothing to draw")
    return [np.array([line[name] for line in metrics], dtype=float) for name in names]
