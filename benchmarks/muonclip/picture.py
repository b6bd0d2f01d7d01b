"""Draws the two pictures of docs/MUONCLIP.md from the curves of the runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.muonclip.settings import ADAMW, CLIP, CONTROL, MUON, MUONCLIP, RATES, Plan
from benchmarks.muonclip.summary import Curve, find, running_mean

DPI = 140
# Colours that colour-blind readers can tell apart.
LINES = {
    ADAMW: ("#2f8f7f", "^"),
    CONTROL: ("#e0a93b", "v"),
    MUON: ("#b8562f", "s"),
    MUONCLIP: ("#1f4e9c", "o"),
}
# MuonClip coincides with Muon wherever nothing was clipped, so it is dashed to keep both visible.
BROKEN = {MUONCLIP: (0, (4, 2))}
MUTED = "#6b7280"
# Fraction of the loss curve to skip; the first steps would dominate the scale.
SHOWN_FROM = 0.1

Found = Mapping[str, Any]


def draw_clip(curves: Sequence[Curve], plan: Plan, tokens: int, path: Path) -> None:
    """Write a PNG with each step's largest logit on the left (log) and the loss on the right.

    Args:
        curves: curves of all runs.
        plan: plan, whose first part is drawn.
        tokens: tokens of a step.
        path: output file.
    """
    figure = Figure(figsize=(10.4, 4.2), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in (MUON, MUONCLIP):
        for number, curve in enumerate(find(curves, part=CLIP, optimizer=name)):
            style = _style(name, f"{name}", first=number == 0)
            at = _at(curve, tokens)
            maxima = np.array([np.nan if x is None else x for x in curve["max_logit"]])
            left.plot(at, np.where(maxima > 0, maxima, np.nan), **style)
            _loss(right, curve, plan, tokens, style)
    left.axhline(plan.threshold, color=MUTED, linestyle="--", linewidth=1,
                 label=f"threshold {plan.threshold:g}")  # fmt: skip
    left.set_yscale("log")
    left.set_title("largest attention logit of each step", fontsize=11)
    left.legend(frameon=False, fontsize=9)
    right.set_title(f"loss, mean of the last {plan.tail_steps} steps", fontsize=11)
    right.legend(frameon=False, fontsize=9)
    below = (
        f"million tokens (a line for each of {len(plan.clip_seeds)} seeds; learning rate "
        f"{plan.clip_lr:g}, weight decay and data the same)"
    )
    _finish(figure, (left, right), below, path)


def draw_rates(curves: Sequence[Curve], found: Found, plan: Plan, tokens: int, path: Path) -> None:
    """Write a PNG with the losses at the chosen rates on the left and the sweep on the right.

    Args:
        curves: curves of all runs.
        found: result of `summary.rates_summary`.
        plan: plan, whose second part is drawn.
        tokens: tokens of a step.
        path: output file.
    """
    figure = Figure(figsize=(10.4, 4.2), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in [name for name in LINES if name in found]:
        best = found[name]["lr"]
        for number, curve in enumerate(find(curves, part=RATES, optimizer=name, lr=best)):
            style = _style(name, f"{name}, {1000 * best:.3g}", first=number == 0)
            _loss(left, curve, plan, tokens, style)
        _sweep(right, name, found[name])
    left.set_title(f"loss at tuned rates, mean of the last {plan.tail_steps} steps", fontsize=11)
    left.set_xlabel(f"million tokens (a line for each of {len(plan.rates_seeds)} seeds)")
    left.legend(frameon=False, fontsize=9, title="learning rate / 0.001", title_fontsize=9)
    right.set_xscale("log", base=2)
    rates = sorted({*plan.rates, *plan.control_rates})
    right.set_xticks(rates, [f"{1000 * rate:.3g}" for rate in rates])
    right.minorticks_off()
    right.set_title("the sweep: final loss", fontsize=11)
    right.set_xlabel("learning rate / 0.001 (large marks: chosen, with all seeds)")
    right.legend(frameon=False, fontsize=9)
    _finish(figure, (left, right), None, path)


def _sweep(axes: Axes, name: str, found: Found) -> None:
    color, marker = LINES[name]
    rows = [row for row in found["sweep"] if row["final_loss"] is not None]
    style = {"color": color, "marker": marker, "linestyle": BROKEN.get(name, "-")}
    axes.plot(
        [row["lr"] for row in rows], [row["final_loss"] for row in rows],
        markersize=4, linewidth=1.4, label=name, **style,
    )  # fmt: skip
    losses = [loss for loss in found["final_losses"] if loss is not None]
    axes.plot([found["lr"]] * len(losses), losses, color=color, marker=marker, markersize=9,
              linestyle="none", markerfacecolor="none")  # fmt: skip


def _loss(axes: Axes, curve: Curve, plan: Plan, tokens: int, style: Mapping[str, Any]) -> None:
    at, smooth = _at(curve, tokens), running_mean(curve["loss"], plan.tail_steps)
    start = int(len(smooth) * SHOWN_FROM)
    axes.plot(at[start:], smooth[start:], **style)


def _at(curve: Curve, tokens: int) -> np.ndarray:
    return np.arange(1, len(curve["loss"]) + 1) * tokens / 1e6


def _style(name: str, label: str, *, first: bool) -> dict[str, Any]:
    return {
        "color": LINES[name][0],
        "linewidth": 1.3,
        "linestyle": BROKEN.get(name, "-"),
        "label": label if first else None,
    }


def _finish(figure: Figure, panels: Sequence[Axes], below: str | None, path: Path) -> None:
    for axes in panels:
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    if below is not None:
        figure.supxlabel(below, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
