"""Plans validation steps, which hold each sample once in a fixed order. Pure."""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import share_of
from data_pipeline.plan.planner import Planner
from data_pipeline.plan.step_plan import GlobalPlan
from data_pipeline.plan.window import join


def once(planner: Planner, tokens: int, group: int) -> list[GlobalPlan]:
    """Return steps that hold the first units of each source's first epoch, each unit once.

    The units do not depend on `rows_per_step` or on any state. Samples with a tombstone are
    excluded, regardless of its step. The last step has only as many rows as needed, rounded up to
    a multiple of `group`, so its last rows may be empty.

    Args:
        tokens: maximum number of tokens, divided among the sources by their shares. A source with
            fewer tokens is used in full, and every source contributes at least one unit.
        group: the number of rows of a step is rounded up to a multiple of it.
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
        # A unit that replaces an unusable sample also has its own draw; keep it only once.
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
        # No more rows than needed: an empty row costs as much attention as a full one.
        size = group * -(-(end - first) // group)
        steps.append(GlobalPlan(number, config.seq_len, size, *join([(content, first, end)])))
    return steps
