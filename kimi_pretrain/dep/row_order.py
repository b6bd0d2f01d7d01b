"""Orders the microbatches that a replica runs in a step (`data.order_rows`). Pure function.

The order does not change the rows of a step, of a replica or of a microbatch; only sums over
microbatches are added in another order. It depends on the plan and the number of replicas, so every
rank computes the same order.
"""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.plan.step_plan import GlobalPlan
from kimi_pretrain.config import Config
from moonvit3d.flops import flops

Ints = NDArray[np.int64]

# Depth of a microbatch inside the step: the smaller of FROM_BEGIN times its distance from the first
# microbatch and FROM_END times its distance from the last. So more light rows come before than
# after the heaviest ones, which run shortly after the middle. Found by simulation
# (docs/dep_simulation.md): equal numbers on both sides, or fewer before, are up to a point worse at
# 30 and 50% of vision tokens.
FROM_BEGIN, FROM_END = 10, 17


def microbatch_order(plan: GlobalPlan, config: Config) -> Ints:
    """Return each replica's microbatches in execution order, int64 [replicas, microbatches].

    Microbatch m of a replica holds its rows from m * train.rows_per_microbatch on.
    """
    replicas, per_microbatch = config.layout.dp, config.train.rows_per_microbatch
    count = plan.num_rows // (replicas * per_microbatch)
    if config.data.order_rows == "as_drawn":
        return np.tile(np.arange(count), (replicas, 1))
    items = plan.items
    grids = np.stack([items.frames, items.grid_h, items.grid_w], axis=1).astype(np.int64)
    # Uses FLOPs, not `dep.cost`, because a calibration must not change the order of sums.
    linear, quadratic = flops(grids, config.model.vision)
    work = np.zeros(replicas * count, np.int64)
    np.add.at(work, items.row // per_microbatch, linear + quadratic)
    return light_ends(work.reshape(replicas, count))


def light_ends(work: Ints) -> Ints:
    """Return the order in which work rises towards the middle and then falls.

    Args:
        work: work of each microbatch, integers of any unit, [replicas, microbatches].

    Returns:
        for each replica its microbatches in order, ties by number, int64 [replicas, microbatches].
    """
    place = np.arange(work.shape[1])
    depth = np.minimum(FROM_BEGIN * place, FROM_END * place[::-1])
    order = np.empty(work.shape, np.int64)
    order[:, np.argsort(depth, kind="stable")] = np.argsort(work, axis=1, kind="stable")
    return order
