"""In which order a replica runs the microbatches of a step (`data.order_rows`).

Which rows a step has, and which of them a replica has, is the same in every order, and so is what
lies in one microbatch: only sums over microbatches are added up in another order. A function of the
plan and of the number of replicas, so every rank comes to the same. Pure.
"""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.plan.step_plan import GlobalPlan
from kimi_pretrain.config import Config
from moonvit3d.flops import flops

Ints = NDArray[np.int64]

# How deep inside the step a microbatch lies: its distance from the first one, or that from the last
# one counted this much more. So more light rows lie in front than behind, the heaviest just behind
# the middle. Found by simulation (docs/dep_simulation.md): as many on both sides, or fewer in
# front, are up to a point worse at 30 and 50% of vision tokens.
FROM_BEGIN, FROM_END = 10, 17


def microbatch_order(plan: GlobalPlan, config: Config) -> Ints:
    """Return which microbatch each replica runs first, second, ..., int64 [replicas, microbatches].

    Microbatches are numbered by their rows: number m of a replica holds its rows from
    m * train.rows_per_microbatch on.
    """
    replicas, per_microbatch = config.layout.dp, config.train.rows_per_microbatch
    count = plan.num_rows // (replicas * per_microbatch)
    if config.data.order_rows == "as_drawn":
        return np.tile(np.arange(count), (replicas, 1))
    items = plan.items
    grids = np.stack([items.frames, items.grid_h, items.grid_w], axis=1).astype(np.int64)
    # Counted, not `dep.cost`: a calibration must not change the order of sums.
    linear, quadratic = flops(grids, config.model.vision)
    work = np.zeros(replicas * count, np.int64)
    np.add.at(work, items.row // per_microbatch, linear + quadratic)
    return light_ends(work.reshape(replicas, count))


def light_ends(work: Ints) -> Ints:
    """Return the order in which work rises towards the middle and falls again.

    Args:
        work: of each microbatch, whole numbers of any unit, [replicas, microbatches].

    Returns:
        for each replica its microbatches in their order, equal ones as they are numbered, int64
        [replicas, microbatches].
    """
    place = np.arange(work.shape[1])
    depth = np.minimum(FROM_BEGIN * place, FROM_END * place[::-1])
    order = np.empty(work.shape, np.int64)
    order[:, np.argsort(depth, kind="stable")] = np.argsort(work, axis=1, kind="stable")
    return order
