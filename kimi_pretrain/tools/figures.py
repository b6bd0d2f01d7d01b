"""Figures for all plots, made without pyplot: no display and no global state."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

DPI = 150
MUTED = "#6b7280"
# Colours with a mean channel above this get dark text.
LIGHT = 0.62


def new_figure(
    size: tuple[float, float], rows: int, cols: int, *, grid: bool = True, **how: Any
) -> tuple[Figure, Any]:
    """Return a figure of the given size in inches and its axes, an array [rows * cols].

    Args:
        grid: draw a grid behind the data.
        how: arguments of `Figure.subplots`.
    """
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, cols, squeeze=False, **how).ravel()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        if grid:
            one.grid(color="#e5e7eb", linewidth=0.8)
            one.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's suffix; create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def ink_on(colour: str) -> str:
    """Return a readable text colour for a background colour."""
    return "white" if np.mean(to_rgb(colour)) < LIGHT else "#1f2937"
