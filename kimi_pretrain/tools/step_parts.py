"""The parts of one predicted step in seconds, but for its pipeline's passes. Pure.

Media cost what the plan of the encoder says; a phase takes as long as its slowest rank. No gradient
sum is taken to be hidden behind the last backward pass.
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
        passes: of the pipeline, mean of the stages.
        imbalance: how much longer the passes of the slowest stage take.
        bubble: of the slowest stage: the pipeline is longer than its passes by that.
        vision: of the slowest rank before and behind the pipeline; what runs in bubbles is not
            counted.
        exchange: hand-over and hand-back before and behind the pipeline.
        gradient_sum: of the encoder over all ranks, and of the stage whose sums take longest; and
            the updated weights on their way back.
        update: of the busiest rank; 0 where `dep.update_cost` is not given.
        checkpoint: the step's share of what a save holds the training up.
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
        """The whole step."""
        return sum(getattr(self, field.name) for field in fields(self))


def step_seconds(
    config: Config, line: Timeline, vision: VisionPlan, grids: Ints, traffic: Traffic
) -> StepSeconds:
    """Return the parts of one step, but for what storage adds.

    Args:
        line: of the pipeline with text alone.
        vision: who encodes what, and in which bubbles.
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
    """Return the plan of the items that are encoded before and behind the pipeline."""
    return vision if vision.bubbles is None else vision.together()


def vision_phases(config: Config, vision: VisionPlan, grids: Ints) -> tuple[Floats, Floats]:
    """Return the seconds of each rank in the encoder's forward phase, and in the later one.

    Each rank's later phase costs a fixed multiple of its forward phase, less what
    `dep.keep_activations` spares it.

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
    """Return what each rank is spared by activations that it keeps, float64 [ranks].

    That is a forward pass of the chunks that `dep.memory_limit_gib` has room for.
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

    With `dep.offload_outputs` embeddings go into the host's memory and back, and so do their
    gradients, on the rank that gets most.
    """
    if not len(vision.tokens):
        return 0.0, 0.0
    over = busiest_rank_tokens(vision) * token_bytes(config) / traffic.network
    if config.dep.offload_outputs:
        width = config.model.vision.out_width * ITEMSIZE[config.train.dtype]
        over += 2 * int(vision.tokens_received().max()) * width / traffic.host
    return over, over * (encoder_weights(config) > 0)


def encoder_sum_seconds(config: Config, vision: VisionPlan, network: float) -> float:
    """Return the seconds of the sum of the encoder's gradients; 0 in a step without media."""
    return ring_seconds(config, network) if len(vision.tokens) else 0.0


def ring_seconds(config: Config, network: float) -> float:
    """Return the seconds of a ring that sums the encoder's gradients over all ranks, in float32.

    None of it is taken to be hidden behind the last chunk's backward pass.
    """
    ranks = config.layout.world_size()
    return 2 * 4.0 * encoder_weights(config) * (ranks - 1) / ranks / network


def backbone_sum_seconds(config: Config, traffic: Traffic) -> Floats:
    """Return the seconds in which each stage sums its gradients, and gets weights back, [stages].

    Gradients go in float32 to the ranks that update them, and the updated weights to all others.
    Tensor-parallel ranks gather those of their slices before.
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
    """Return the trained weights of tower and projector, biases and norms left out (0.2%)."""
    vision, frozen = config.model.vision, config.train.frozen
    width, joined = vision.width, 4 * vision.width
    block = 4 * width * width + 2 * width * vision.mlp_width
    tower = vision.depth * block + 3 * 14 * 14 * width + vision.pos_grid**2 * width
    projector = joined * vision.projector_width + vision.projector_width * vision.out_width
    return tower * ("vision_tower" not in frozen) + projector * ("projector" not in frozen)
