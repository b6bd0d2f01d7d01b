"""Draws the first stage's peak memory against the images per microbatch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.dep.settings import COLOCATED, DEP, TEXT_ONLY
from benchmarks.dep.targets import FIRST, encoder_peak, step_peak

DPI = 140
# Colours that colour-blind readers can tell apart.
LINES = {
    COLOCATED: ("encoder co-located on the first stage", "#b8562f", "s"),
    DEP: ("DEP", "#1f4e9c", "o"),
}
MUTED, INSIDE = "#6b7280", "#2f8f7f"


def draw(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG with the whole step on the left and the phases that DEP adds on the right."""
    figure = Figure(figsize=(9.6, 4.2), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, (label, color, marker) in LINES.items():
        _line(left, curve, name, step_peak, label=label, color=color, marker=marker)
    text = step_peak(curve[0]["peaks"][TEXT_ONLY][FIRST])
    left.axhline(text, color=MUTED, linestyle="--", linewidth=1, label="text in their place")
    left.set_title("whole step", fontsize=11)
    left.set_ylabel("peak memory of the first stage (MiB)")
    left.legend(frameon=False, fontsize=9, loc="upper left")
    _line(right, curve, DEP, encoder_peak, color=INSIDE, marker="o")
    right.set_title("DEP's own phases (2, 3, 5, 6)", fontsize=11)
    _mark_full_chunk(right, curve)
    for axes in (left, right):
        axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
        axes.set_xscale("log", base=2)
        counts = [point["images"] for point in curve]
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"images in a microbatch, of {_patches(curve)} patches each", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _line(
    axes: Axes,
    curve: Sequence[Mapping[str, Any]],
    name: str,
    peak: Callable[[Mapping[str, int]], float],
    **style: Any,
) -> None:
    counts = [point["images"] for point in curve]
    values = [peak(point["peaks"][name][FIRST]) for point in curve]
    axes.plot(counts, values, markersize=5, **style)
    if style.get("marker"):
        axes.annotate(f"{values[-1]:.0f}", (counts[-1], values[-1]), xytext=(0, 6), fontsize=9,
                      textcoords="offset points", color=style["color"], ha="center")  # fmt: skip


def _mark_full_chunk(axes: Axes, curve: Sequence[Mapping[str, Any]]) -> None:
    """Mark the point from which a rank's share of the step exceeds one chunk."""
    ranks = len(curve[0]["peaks"][DEP])
    full = curve[0]["chunk"] * ranks / (curve[0]["microbatches"] * _patches(curve))
    axes.axvline(full, color=MUTED, linestyle=":", linewidth=1)
    axes.annotate(
        f"from here a rank encodes\nmore than one chunk\nof {curve[0]['chunk']:,} patches",
        (full, 0), xytext=(-6, 12), textcoords="offset points", fontsize=9, color=MUTED, ha="right",
    )  # fmt: skip


def _patches(curve: Sequence[Mapping[str, Any]]) -> int:
    return curve[0]["patches"] // curve[0]["images"]
