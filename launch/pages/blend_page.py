"""What steps are made of: tokens by source over some steps, beside the shares of the blend."""

from collections.abc import Iterator, Sequence

import numpy as np

from data_pipeline.plan.blend import UNITS
from data_pipeline.plan.planner import GlobalPlan, Planner
from launch.pages.html import amount, percent, table, text
from launch.pages.pictures import colour_class

_HEIGHT = 100  # of the drawing, in percent of a step's rows


def blend_body(planner: Planner, plans: Sequence[GlobalPlan]) -> Iterator[str]:
    """Yield tables and a drawing of some steps, as HTML.

    Args:
        planner: of the run.
        plans: of steps in a row.
    """
    names = [index.name for index in planner.indices]
    totals = np.zeros((len(plans), len(names), 3), np.int64)  # samples, tokens, media tokens
    for place, plan in enumerate(plans):
        table_, items = plan.samples, plan.items
        lengths = (np.ones(len(table_), np.int64), table_.length)
        for kind, values in enumerate(lengths):
            np.add.at(totals[place, :, kind], table_.source, values)
        np.add.at(totals[place, :, 2], table_.source[items.sample], items.tokens)
    capacity = sum(plan.num_rows * plan.seq_len for plan in plans)
    tokens = int(totals[:, :, 1].sum())
    yield (
        f"<p>{amount(tokens)} tokens of {amount(capacity)} places "
        f"({percent(tokens / capacity)} filled).</p>"
    )
    yield _drawing(names, plans, totals[:, :, 1])
    yield table(
        ["source", "samples", "tokens", "of all tokens", "media tokens", "draws by the blend"],
        _rows(names, planner, plans, totals.sum(axis=0)),
    )
    segments = planner.mixture.segments
    if len(segments) > 1:
        yield "<h2>Stretches of equal shares</h2>"
        yield table(
            ["from position", *names],
            [[amount(one.start), *(percent(w / UNITS) for w in one.weights)] for one in segments],
        )


def _rows(
    names: Sequence[str], planner: Planner, plans: Sequence[GlobalPlan], sums: np.ndarray
) -> Iterator[list[str]]:
    first = min(
        (int(plan.samples.position.min()) for plan in plans if len(plan.samples)), default=0
    )
    weights = [s for s in planner.mixture.segments if s.start <= first][-1].weights
    total = max(int(sums[:, 1].sum()), 1)
    for name, (samples, tokens, media), weight in zip(names, sums.tolist(), weights, strict=True):
        share = percent(tokens / total)
        yield [name, amount(samples), amount(tokens), share, amount(media), percent(weight / UNITS)]


def _drawing(names: Sequence[str], plans: Sequence[GlobalPlan], tokens: np.ndarray) -> str:
    """Return a bar for each step, whose parts are the sources, and a legend."""
    bars = []
    for place, plan in enumerate(plans):
        below = 0.0
        for number, name in enumerate(names):
            part = float(_HEIGHT * tokens[place, number] / (plan.num_rows * plan.seq_len))
            if part:
                bars.append(
                    f'<rect class="{colour_class(number)}" x="{place + 0.05:.2f}" width="0.9" '
                    f'y="{_HEIGHT - below - part:.3f}" height="{part:.3f}" fill="currentColor">'
                    f"<title>step {plan.step + 1}, {text(name)}: {int(tokens[place, number]):,} "
                    f"tokens</title></rect>"
                )
            below += part
    legend = " ".join(
        f'<span class="{colour_class(number)}">&#9632;</span> {text(name)}'
        for number, name in enumerate(names)
    )
    return (
        f'<svg class="blend" viewBox="0 0 {len(plans)} {_HEIGHT}" preserveAspectRatio="none">'
        f'{"".join(bars)}</svg>\n<p class="note">{legend}</p>'
    )
