"""Charts drawn from real tables, with the values they show as text.

The tables ship inside the `vega-datasets` wheel and are read as plain files. Figures are built
without pyplot, under matplotlib's default settings, so neither global state nor the user's own
matplotlibrc can change a pixel.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from data_pipeline.ingest.samples import CrudeSample, ImageSegment, TextSegment
from launch.demo.digits import png
from launch.demo.generator import generator
from launch.demo.photos import package_file


@dataclass(frozen=True)
class Table:
    """A table of vega-datasets: the column that labels a row, and the numeric columns to draw."""

    file: str
    label: str
    values: tuple[str, ...]


TABLES = (
    Table("barley.json", "variety", ("yield",)),
    Table("burtin.json", "Bacteria", ("Penicillin", "Streptomycin", "Neomycin")),
    Table("cars.json", "Name", ("Miles_per_Gallon", "Horsepower", "Weight_in_lbs", "Acceleration")),
    Table("crimea.json", "date", ("wounds", "other", "disease")),
    Table("driving.json", "year", ("miles", "gas")),
    Table("iowa-electricity.csv", "year", ("net_generation",)),
    Table("iris.json", "species", ("sepalLength", "sepalWidth", "petalLength", "petalWidth")),
    Table("ohlc.json", "date", ("open", "high", "low", "close")),
    Table("seattle-weather.csv", "date", ("precipitation", "temp_max", "temp_min", "wind")),
    Table("stocks.csv", "date", ("price",)),
    Table("us-employment.csv", "month", ("nonfarm", "construction", "manufacturing")),
    Table("wheat.json", "year", ("wheat", "wages")),
)
KINDS = ("bar", "barh", "line", "scatter")
# Few rows and short names, because picture and values together must fit a row of 256 tokens.
NUM_ROWS = (3, 5)
LABEL_CHARS = 10
# Inches and dots per inch: from thumbnails to charts at the patch limit of a tiny model.
SIZES = ((2, 1.5), (2, 2), (3, 2), (4, 3), (6, 4), (8, 3), (4, 8))
DPIS = (40, 60, 90)


@cache
def rows(file: str) -> list[dict]:
    """Read a table of vega-datasets as a list of rows."""
    place = package_file(f"vega_datasets/_data/{file}")
    text = place.read_text(encoding="utf-8-sig")
    if file.endswith(".json"):
        return json.loads(text)
    return list(csv.DictReader(text.splitlines()))


def series(table: Table, rng: np.random.Generator) -> tuple[str, list[str], list[float]]:
    """Choose a column and 3 to 5 successive rows with a value in it."""
    column = table.values[rng.integers(len(table.values))]
    known = [r for r in rows(table.file) if r.get(column) not in (None, "")]
    count = min(len(known), int(rng.integers(NUM_ROWS[0], NUM_ROWS[1] + 1)))
    start = int(rng.integers(0, len(known) - count + 1))
    chosen = known[start : start + count]
    return (
        column,
        [str(r[table.label])[:LABEL_CHARS] for r in chosen],
        [float(r[column]) for r in chosen],
    )


def draw(kind: str, title: str, labels: list[str], values: list[float], size, dpi) -> np.ndarray:
    """Draw one chart; return uint8 [H, W, 3]."""
    figure = Figure(figsize=size, dpi=dpi, layout="tight")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(values))
    if kind == "barh":
        axes.barh(places, values)
        axes.set_yticks(places, labels, fontsize=7)
    else:
        plot = {"bar": axes.bar, "line": axes.plot, "scatter": axes.scatter}[kind]
        plot(places, values)
        axes.set_xticks(places, labels, rotation=60, fontsize=7)
    axes.set_title(title, fontsize=8)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3]


def charts(seed: int, *, count: int) -> Iterator[CrudeSample]:
    """Yield `count` charts as PNG; the text names kind, column and every value."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        for item in range(count):
            rng = generator(seed, "charts", item)
            table = TABLES[item % len(TABLES)]
            column, labels, values = series(table, rng)
            kind = KINDS[rng.integers(len(KINDS))]
            size, dpi = SIZES[rng.integers(len(SIZES))], DPIS[rng.integers(len(DPIS))]
            picture = draw(kind, f"{column} by {table.label}", labels, values, size, dpi)
            told = ", ".join(f"{name} {value:g}" for name, value in zip(labels, values))
            yield CrudeSample(
                f"charts-{item:04d}",
                [
                    ImageSegment(png(picture), "png"),
                    TextSegment(f"{kind} chart of {column}: {told}", True),
                ],
                {"source": table.file, "kind": kind, "values": values},
            )
