"""Simulates a step that encodes before and after the pipeline, with the project's vision plan.

    vision forward | hand-over | pipeline, as long as with text only | hand-back | recompute and
    backward | sum of the encoder's gradients

No encoder work is hidden in the pipeline's bubbles. A phase takes as long as its slowest rank.
Ranks wait for each other where they exchange embeddings (within a scope) and, inside the pipeline,
where they exchange tokens for experts.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.sim.assumptions import Assumptions, gradient_sum_seconds
from benchmarks.sim.backbone import text_seconds
from data_pipeline.plan.step_plan import GlobalPlan
from kimi_pretrain.config import GIB, Config, replicas_per_scope
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP, CostModel
from kimi_pretrain.dep.memory_limit import cut, kept_chunks
from kimi_pretrain.dep.places import seconds_of_part
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.vision_plan import VisionPlan, grids_of
from kimi_pretrain.parallel.ranks import Ranks
from moonvit3d.memory import activation_bytes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BYTES = 2  # bytes per number in transit and in memory: bfloat16


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, in parts that add up to `total`.

    Attributes:
        text: pipeline with text only.
        encoder: encoder time of every rank in perfect balance.
        imbalance: extra time of the slowest rank in both phases.
        exchange: hand-over and hand-back.
        overhead: gradient sum, launches and waits.
        total: the whole step.
    """

    text: float
    encoder: float
    imbalance: float
    exchange: float
    overhead: float
    total: float


def true_plan(plan: GlobalPlan, config: Config, assumed: Assumptions) -> VisionPlan:
    """Return the project's vision plan with true item costs in place of the estimates."""
    vision = VisionPlanner(config).plan(plan)
    draw = np.random.Generator(np.random.Philox(key=(config.data.seed, plan.step)))
    off = np.exp(assumed.cost_scatter * draw.standard_normal(len(vision.patches)))
    split = assumed.split_efficiency or vision.split_efficiency
    costs = true_costs(config, assumed).seconds(vision.patches)
    return replace(vision, costs=costs * off, split_efficiency=split)


def true_costs(config: Config, assumed: Assumptions) -> CostModel:
    """Return the model of true item costs, in seconds."""
    model = CostModel.from_flops(config.model.vision, assumed.encoder_flops)
    more = (assumed.attention_backward - 2) / FORWARDS_PER_STEP
    return replace(model, per_patch_squared=model.per_patch_squared * (1 + more))


def decoupled(
    vision: VisionPlan, plan: GlobalPlan, config: Config, assumed: Assumptions, text: float
) -> StepTime:
    """Return the time of a step whose encoder runs before and after the pipeline.

    Args:
        vision: assignment of items, with true costs.
        plan: rows and items of the step.
        config: layout and `dep`.
        assumed: machine speeds.
        text: seconds of the pipeline.
    """
    seconds = vision.predicted_seconds()
    forward = seconds / FORWARDS_PER_STEP
    backward = seconds - forward - kept_seconds(vision, plan, config)
    ranks = Ranks(config.layout, config.dep.ranks_per_node)
    scope = ranks.replica // replicas_per_scope(config)
    exchange = exchange_seconds(vision, config, assumed, scope)
    # Replicas wait for each other within an expert group and within a scope.
    together = ranks.replica // max(replicas_per_scope(config), config.layout.ep)
    phases = _slowest(forward, together) + _slowest(backward, together)
    both = 2 * _slowest(exchange[scope], together)
    worst = int((phases + both).argmax())
    overhead = gradient_sum_seconds(config, assumed) + 2 * assumed.phase_seconds
    mean = float((forward + backward).mean())
    total = text + float(phases[worst] + both[worst]) + overhead
    return StepTime(text, mean, float(phases[worst]) - mean, float(both[worst]), overhead, total)


def _slowest(values: Floats, group: Ints) -> Floats:
    """Return the largest value of each group, float64 [groups]."""
    found = np.zeros(int(group.max()) + 1)
    np.maximum.at(found, group, values)
    return found


def exchange_seconds(
    vision: VisionPlan, config: Config, assumed: Assumptions, scope: Ints
) -> Floats:
    """Return the seconds of the hand-over in each scope, float64 [scopes].

    The busiest rank determines the time. Tokens that stay on their rank cost nothing; all others
    move at the speed between nodes.
    """
    busier = np.maximum(*vision.tokens_away())
    embedding = config.model.vision.out_width * BYTES
    return _slowest(busier * embedding / assumed.network, scope)


def kept_seconds(vision: VisionPlan, plan: GlobalPlan, config: Config) -> Floats:
    """Return the seconds of recompute that each rank saves, float64 [ranks].

    Chunks are cut and kept as in `kimi_pretrain.dep.encoder`.
    """
    saved = np.zeros(vision.num_ranks)
    if config.dep.keep_activations == "none":
        return saved
    assert config.dep.memory_limit_gib is not None
    whole = activation_bytes(grids_of(plan), config.model.vision, BYTES)
    room = (
        config.dep.memory_limit_gib * GIB
        - vision.tokens_held() * config.model.vision.out_width * BYTES
    )
    recompute = vision.costs / FORWARDS_PER_STEP
    for rank in range(vision.num_ranks):
        mine = vision.encoded_by(rank)
        patches = vision.patches[mine.item].tolist()
        cuts = cut(mine, patches, config.dep.max_patches_per_chunk)
        bytes_of = whole[mine.item] / mine.parts
        sizes = [int(bytes_of[one].sum()) for one in cuts]
        kept = kept_chunks(sizes, int(room[rank]), int((mine.parts > 1).sum()))
        seconds = seconds_of_part(recompute[mine.item], mine.parts, vision.split_efficiency)
        saved[rank] = sum(seconds[one].sum() for one, keep in zip(cuts, kept) if keep)
    return saved


def colocated(plan: GlobalPlan, config: Config, assumed: Assumptions, text: float) -> StepTime:
    """Return the time of a step whose first stages encode inside the graph, without recompute.

    The replicas of an expert group synchronize in every layer, so each microbatch takes as long as
    the one with the most media in its group.
    """
    model = CostModel.from_flops(config.model.vision, assumed.encoder_flops)
    once = model.seconds(plan.items.patches) / FORWARDS_PER_STEP
    count = config.num_microbatches()
    microbatch = plan.items.row.astype(np.int64) // config.train.rows_per_microbatch
    load = np.bincount(microbatch, once, config.layout.dp * count)
    groups = load.reshape(-1, config.layout.ep, count).max(axis=1)
    slowest = max(text_seconds(config, assumed, extra, 2 * extra) for extra in groups)
    overhead = gradient_sum_seconds(config, assumed)
    mean = 3 * float(once.sum()) / config.layout.world_size()
    return StepTime(text, mean, slowest - text - mean, 0.0, overhead, slowest + overhead)
