"""Steps that hold samples once, in a fixed order: what a validation goes through. Pure."""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import share_of
from data_pipeline.plan.planner import Planner
from data_pipeline.plan.step_plan import GlobalPlan
from data_pipeline.plan.window import join


def once(planner: Planner, tokens: int, group: int) -> list[GlobalPlan]:
    """Return steps that hold the first units of each source's first epoch, each of them once.

    The units do not depend on `rows_per_step` or on any state; samples with a tombstone, of
    whatever step, are not among them. The last step has no more rows than
    it takes; the last of them may hold none.

    Args:
        tokens: most that are taken, shared among the sources by their shares; of a source that
            holds fewer all are, and one unit at least is.
        group: rows of whose multiples a step is made.
    """
    config = planner.config
    shares = [share_of(config.sources[source.index.name]) for source in planner.sources]
    sources: list[NDArray[np.int16]] = []
    out = planner.tombstones.filled()
    draws: list[NDArray[np.int64]] = []
    for number, (source, share) in enumerate(zip(planner.sources, shares, strict=True)):
        most = int(tokens * share / sum(shares))
        bad = sorted(sample for owner, sample in out if owner == number)
        drawn = source.draw(np.arange(min(source.num_units, max(1, most))), bad)
        # What fills the place of a sample that does not fit a row has a place of its own.
        units = np.stack([drawn.sample, drawn.part], 1)
        own = np.sort(np.unique(units, axis=0, return_index=True)[1])
        taken = np.cumsum(drawn.layout.length[own], dtype=np.int64) <= most
        taken[0] = True
        draws.append(own[taken])
        sources.append(np.full(len(draws[-1]), number, np.int16))
    draw = np.concatenate(draws)
    content = planner.packed(np.arange(len(draw)), np.concatenate(sources), draw, out)
    rows, per_step = content.packed.num_rows, config.rows_per_step
    steps = []
    for number, first in enumerate(range(0, rows, per_step)):
        end = min(first + per_step, rows)
        # A row without samples costs as much attention as a full one.
        size = group * -(-(end - first) // group)
        steps.append(GlobalPlan(number, config.seq_len, size, *join([(content, first, end)])))
    return steps
