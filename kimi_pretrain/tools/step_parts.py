"""Computes the seconds of one predicted step's parts from its timeline and vision plan. Pure.

Media cost what the vision plan predicts; a phase takes as long as its slowest rank. Gradient sums
are assumed not to overlap with the last backward pass.
"""

from dataclasses import dataclass, fields

import numpy as np

from kimi_pretrain.config import GIB, ITEMSIZE, Config
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP
from kimi_pretrain.dep.memory_limit import cut, kept_chunks
from kimi_pretrain.dep.pass_costs import Floats, sharing_ranks, stage_parameters, update_seconds
from kimi_pretrain.dep.timeline import Timeline
from kimi_pretrain.dep.vision_plan import Ints, VisionPlan
from kimi_pretrain.tools.predict import busiest_rank_tokens, token_bytes
from kimi_pretrain.tools.text_passes import Traffic
from moonvit3d.memory import activation_bytes


@dataclass(frozen=True)
class StepSeconds:
    """Predicted seconds of a step, in parts that add up to it.

    Attributes:
        passes: pipeline passes, mean of the stages.
        imbalance: passes of the slowest stage minus this mean.
        bubble: length of the pipeline minus the passes of the slowest stage.
        vision: vision work of the slowest rank before and after the pipeline; work in bubbles is
            not counted.
        exchange: hand-over and hand-back before and after the pipeline.
        gradient_sum: sum of the encoder's gradients over all ranks, sums of the slowest stage, and
            the return of the updated weights.
        update: update on the busiest rank; 0 if `dep.update_cost` is not given.
        checkpoint: stall of a save, divided by the steps between saves.
        loader: wait for data.
    """

    passes: float
    imbalance: float
    bubble: float
    vision: float
    exchange: float
    gradient_sum: float
    update: float
    checkpoint: float = 0.0
    loader: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, field.name) for field in fields(self))


def step_seconds(
    config: Config, line: Timeline, vision: VisionPlan, grids: Ints, traffic: Traffic
) -> StepSeconds:
    """Return the parts of one step, without the waits for storage.

    Args:
        line: timeline of the pipeline with text only.
        vision: assignment of items to ranks and bubbles.
        grids: patch grids (frames, height, width) of the step's items, [items, 3].
    """
    passes = (line.end - line.start).sum(axis=1)
    inside, outside = vision.bubbles, outside_bubbles(vision)
    forward, later = vision_phases(config, outside, grids)
    seconds = float((forward + later).max(initial=0.0))
    if inside is not None:
        seconds += inside.plan.upfront + inside.plan.after
    return StepSeconds(
        passes=float(passes.mean()),
        imbalance=float(passes.max() - passes.mean()),
        bubble=line.total - float(passes.max()),
        vision=seconds,
        exchange=sum(exchange_seconds(config, outside, traffic)),
        gradient_sum=float(backbone_sum_seconds(config, traffic).max())
        + encoder_sum_seconds(config, vision, traffic.network),
        update=update_seconds(config),
    )


def outside_bubbles(vision: VisionPlan) -> VisionPlan:
    """Return the plan of the items that are encoded before and after the pipeline."""
    return vision if vision.bubbles is None else vision.together()


def vision_phases(config: Config, vision: VisionPlan, grids: Ints) -> tuple[Floats, Floats]:
    """Return each rank's seconds in the encoder's forward phase and in its backward phase.

    A rank's backward phase costs a fixed multiple of its forward phase, minus the recompute that
    `dep.keep_activations` saves.

    Args:
        grids: as in `step_seconds`.

    Returns:
        float64 [ranks] each.
    """
    seconds = vision.predicted_seconds()
    if config.dep.cost is not None:
        chunks = np.ceil(vision.patches_per_rank() / config.dep.max_patches_per_chunk)
        seconds = seconds + config.dep.cost.per_chunk * chunks
    forward = seconds / FORWARDS_PER_STEP
    if "vision_tower" in config.train.frozen:
        return forward, 0.0 * seconds
    return forward, seconds - forward - kept_seconds(config, vision, grids)


def kept_seconds(config: Config, vision: VisionPlan, grids: Ints) -> Floats:
    """Return the seconds that each rank saves by keeping activations, float64 [ranks].

    It saves the recomputed forward pass of the chunks that fit under `dep.memory_limit_gib`.
    """
    dep, found = config.dep, np.zeros(vision.num_ranks)
    if dep.keep_activations == "none" or not len(vision.shares):
        return found
    assert dep.memory_limit_gib is not None  # checked with the configuration
    item = ITEMSIZE[config.train.dtype]
    rooms = int(dep.memory_limit_gib * GIB) - vision.tokens_held() * (
        config.model.vision.out_width * item
    )
    start = 0.0 if dep.cost is None else dep.cost.per_chunk
    sizes = activation_bytes(grids, config.model.vision, item)
    for rank in np.unique(vision.shares.rank).tolist():
        shares = vision.encoded_by(rank)
        cuts = cut(shares, vision.patches[shares.item].tolist(), dep.max_patches_per_chunk)
        each = [int((sizes[shares.item[one]] / shares.parts[one]).sum()) for one in cuts]
        kept = kept_chunks(each, int(rooms[rank]), int((shares.parts > 1).sum()))
        spared = (
            vision.costs[shares.item[one]].sum() + start
            for one, keep in zip(cuts, kept, strict=True)
            if keep
        )
        found[rank] = sum(spared) / FORWARDS_PER_STEP
    return found


def exchange_seconds(config: Config, vision: VisionPlan, traffic: Traffic) -> tuple[float, float]:
    """Return the seconds of hand-over and hand-back; a frozen encoder has no hand-back.

    With `dep.offload_outputs`, they include copies of embeddings, and of their gradients, to host
    memory and back, on the rank that receives most.
    """
    if not len(vision.tokens):
        return 0.0, 0.0
    over = busiest_rank_tokens(vision) * token_bytes(config) / traffic.network
    if config.dep.offload_outputs:
        width = config.model.vision.out_width * ITEMSIZE[config.train.dtype]
        over += 2 * int(vision.tokens_received().max()) * width / traffic.host
    return over, over * (encoder_weights(config) > 0)


def encoder_sum_seconds(config: Config, vision: VisionPlan, network: float) -> float:
    """Return the seconds to sum the encoder's gradients; 0 for a step without media."""
    return ring_seconds(config, network) if len(vision.tokens) else 0.0


def ring_seconds(config: Config, network: float) -> float:
    """Return the seconds of a ring all-reduce of the encoder's gradients, in float32.

    No overlap with the last chunk's backward pass is assumed.
    """
    ranks = config.layout.world_size()
    return 2 * 4.0 * encoder_weights(config) * (ranks - 1) / ranks / network


def backbone_sum_seconds(config: Config, traffic: Traffic) -> Floats:
    """Return each stage's seconds to sum gradients and to receive updated weights, [stages].

    Gradients go in float32 to the ranks that update them, and the updated weights to all others.
    Before that, tensor-parallel ranks gather the gradients of their slices.
    """
    moved = np.zeros(config.layout.pp)
    if "language_model" in config.train.frozen:
        return moved
    for parameters, ranks in zip(stage_parameters(config), sharing_ranks(config), strict=True):
        moved = moved + parameters * (ranks - 1) / ranks
    size, tp = ITEMSIZE[config.train.dtype], config.layout.tp
    dense, _ = stage_parameters(config)
    slices = dense * max(4, size) * (tp - 1) / tp / traffic.rate(config, tp)
    return moved * (max(4, size) + size) / traffic.network + slices


def encoder_weights(config: Config) -> int:
    """Return the trained weights of tower and projector, without biases and norms (0.2%)."""
    vision, frozen = config.model.vision, config.train.frozen
    width, joined = vision.width, 4 * vision.width
    block = 4 * width * width + 2 * width * vision.mlp_width
    tower = vision.depth * block + 3 * 14 * 14 * width + vision.pos_grid**2 * width
    projector = joined * vision.projector_width + vision.projector_width * vision.out_width
    return tower * ("vision_tower" not in frozen) + projector * ("projector" not in frozen)
