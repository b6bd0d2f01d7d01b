"""Mixture of sources in some steps: tokens by source, next to the mixture weights."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.plan.blend import UNITS
from data_pipeline.plan.planner import GlobalPlan, Planner
from launch.pages.html import amount, percent, table, text
from launch.pages.pictures import colour_class

_HEIGHT = 100  # height of the drawing, in percent of a step's rows


class StepSums(NamedTuple):
    """Sums over the samples of a step, by source.

    Attributes:
        step: number of the step, from 0.
        capacity: tokens that fit into the step's rows.
        position: position of its first sample in the stream; None for a step without samples.
        sums: samples, tokens and media tokens, int64 [sources, 3].
    """

    step: int
    capacity: int
    position: int | None
    sums: NDArray[np.int64]


def sums_of(plan: GlobalPlan, num_sources: int) -> StepSums:
    """Return the sums of a step by source."""
    samples, items = plan.samples, plan.items
    sums = np.zeros((num_sources, 3), np.int64)
    np.add.at(sums[:, 0], samples.source, 1)
    np.add.at(sums[:, 1], samples.source, samples.length)
    np.add.at(sums[:, 2], samples.source[items.sample], items.tokens)
    position = int(samples.position.min()) if len(samples) else None
    return StepSums(plan.step, plan.num_rows * plan.seq_len, position, sums)


def blend_body(planner: Planner, steps: Sequence[StepSums]) -> Iterator[str]:
    """Yield tables and a drawing of some steps, as HTML.

    Args:
        planner: data planner of the run.
        steps: sums of consecutive steps.
    """
    names = [index.name for index in planner.indices]
    totals = sum((one.sums for one in steps), np.zeros((len(names), 3), np.int64))
    capacity = sum(one.capacity for one in steps)
    tokens = int(totals[:, 1].sum())
    yield (
        f"<p>{amount(tokens)} tokens of {amount(capacity)} places "
        f"({percent(tokens / capacity)} filled).</p>"
    )
    yield _drawing(names, steps)
    yield table(
        ["source", "samples", "tokens", "of all tokens", "media tokens", "draws by the blend"],
        _rows(names, planner, steps, totals),
    )
    segments = planner.mixture.segments
    if len(segments) > 1:
        yield "<h2>Stretches of equal shares</h2>"
        yield table(
            ["from position", *names],
            [[amount(one.start), *(percent(w / UNITS) for w in one.weights)] for one in segments],
        )


def _rows(
    names: Sequence[str], planner: Planner, steps: Sequence[StepSums], sums: NDArray[np.int64]
) -> Iterator[list[str]]:
    first = min((one.position for one in steps if one.position is not None), default=0)
    weights = [s for s in planner.mixture.segments if s.start <= first][-1].weights
    total = max(int(sums[:, 1].sum()), 1)
    for name, (samples, tokens, media), weight in zip(names, sums.tolist(), weights, strict=True):
        share = percent(tokens / total)
        yield [name, amount(samples), amount(tokens), share, amount(media), percent(weight / UNITS)]


def _drawing(names: Sequence[str], steps: Sequence[StepSums]) -> str:
    """Return a stacked bar of the sources for each step, and a legend."""
    bars = []
    for place, one in enumerate(steps):
        below = 0.0
        for number, (name, tokens) in enumerate(zip(names, one.sums[:, 1].tolist(), strict=True)):
            part = _HEIGHT * tokens / one.capacity
            if part:
                bars.append(
                    f'<rect class="{colour_class(number)}" x="{place + 0.05:.2f}" width="0.9" '
                    f'y="{_HEIGHT - below - part:.3f}" height="{part:.3f}" fill="currentColor">'
                    f"<title>step {one.step + 1}, {text(name)}: {tokens:,} tokens</title></rect>"
                )
            below += part
    legend = " ".join(
        f'<span class="{colour_class(number)}">&#9632;</span> {text(name)}'
        for number, name in enumerate(names)
    )
    return (
        f'<svg class="blend" viewBox="0 0 {len(steps)} {_HEIGHT}" preserveAspectRatio="none">'
        f'{"".join(bars)}</svg>\n<p class="note">{legend}</p>'
    )
