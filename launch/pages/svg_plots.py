"""Histograms and stacked bars as inline SVG in the page's colours, light or dark."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from launch.pages.html import amount

# Placeholder colours; `_svg` replaces them with the colours of the page.
_INK, _LINE, _BAR = "#010203", "#040506", "#070809"
_PAGE = {_INK: "currentColor", _LINE: "var(--line)", _BAR: "var(--bar)"}
_SIZE = (4.6, 2.3)
# Text stays text instead of paths, so that it has the page's colour and can be searched.
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of sources may hold dollar signs
    "svg.hashsalt": "kimi-pretrain",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "font.size": 9,
    "font.family": "sans-serif",
}


def histogram(found: Mapping[str, Sequence[float]], title: str, unit: str, count: str) -> str:
    """Return a histogram with logarithmic bins (`data_pipeline.inspect.stats.histogram`).

    Args:
        found: counts, edges and zeros.
        title: title of the plot.
        unit: label of the x axis.
        count: label of the y axis.
    """
    edges, counts = np.array(found["edges"]), np.array(found["counts"])
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure()
        axes.set_title(title, fontsize=10)
        if edges.size:
            places = np.arange(counts.size)
            axes.bar(places, counts, width=0.9, align="edge", color=_BAR)
            # At most nine edges are labelled, so that labels do not overlap.
            step = max(1, -(-counts.size // 9))
            named = np.arange(0, counts.size + 1, step)
            axes.set_xticks(named, [amount(float(f"{edges[i]:.3g}")) for i in named])
        else:
            axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
        axes.set_xlabel(
            unit if not found["zeros"][0] else f"{unit} ({found['zeros'][0]:,.0f} at 0)"
        )
        axes.set_ylabel(count)
        return _svg(figure)


def two_histograms(
    found: Sequence[Mapping[str, Sequence[float]]], names: Sequence[str], title: str
) -> str:
    """Return two histograms in one plot, each normalised to its total.

    Args:
        found: two histograms as for `histogram`, with the same bin width in octaves.
        names: names of the two histograms.
        title: title of the plot.
    """
    # Equal edges are equal floats, because one formula computes them for every histogram.
    edges = sorted({edge for one in found for edge in one["edges"]})
    place = {edge: number for number, edge in enumerate(edges)}
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure()
        axes.set_title(title, fontsize=10)
        for one, name, colour in zip(found, names, ("#d97742", _BAR), strict=True):
            total = sum(one["counts"]) + one["zeros"][0]
            heights = np.zeros(max(len(edges) - 1, 0))
            for edge, count in zip(one["edges"], one["counts"]):
                heights[place[edge]] = count / total
            if not total or not edges:
                continue
            label = name if not one["zeros"][0] else f"{name} ({one['zeros'][0] / total:.1%} at 0)"
            axes.stairs(heights, np.arange(len(edges)), color=colour, label=label, linewidth=1.4)
        if not edges:
            axes.text(0.5, 0.5, "all are 0", ha="center", va="center", transform=axes.transAxes)
            return _svg(figure)
        step = max(1, -(-len(edges) // 9))
        named = range(0, len(edges), step)
        axes.set_xticks(list(named), [amount(float(f"{edges[i]:.3g}")) for i in named])
        axes.set_ylabel("share")
        axes.legend(frameon=False, fontsize=8)
        return _svg(figure)


def shares(rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], title: str) -> str:
    """Return one stacked bar per row.

    Args:
        rows: (name, amounts of its parts) per row.
        parts: names of the parts.
        title: title of the plot.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure((9.4, 0.8 + 0.32 * len(rows)))
        left = np.zeros(len(rows))
        colours = (_BAR, "#d97742", "#8a94a3", "#2f8f7f")
        for number, part in enumerate(parts):
            widths = np.array([amounts[number] for _, amounts in rows], float)
            axes.barh(np.arange(len(rows)), widths, left=left, color=colours[number], label=part)
            left += widths
        axes.set_yticks(np.arange(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
        return _svg(figure)


def _figure(size: tuple[float, float] = _SIZE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(out, format="svg", metadata=nothing)
    drawing = out.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    for colour, name in _PAGE.items():
        drawing = drawing.replace(colour, name)
    # The server's content security policy blocks inline styles.
    drawing = re.sub(r"<style.*?</style>", "", drawing, flags=re.DOTALL)
    drawing = drawing.replace("<svg", '<svg stroke-linejoin="round" stroke-linecap="butt"', 1)
    drawing = re.sub(r'style="([^"]*)"', _attributes, drawing)
    return re.sub(r"\s+", " ", drawing)


def _attributes(style: re.Match[str]) -> str:
    """Return the properties of an inline style as attributes."""
    pairs = (part.split(":", 1) for part in style[1].split(";") if part.strip())
    return " ".join(f'{name.strip()}="{value.strip()}"' for name, value in pairs)
