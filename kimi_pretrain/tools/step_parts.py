"""The parts of one predicted step in seconds, but for its pipeline's passes. Pure.

Media cost what the plan of the encoder says; a phase takes as long as its slowest rank. No gradient
sum is taken to be hidden behind the last backward pass.
"""

from dataclasses import dataclass, fields

import numpy as np

from kimi_pretrain.config import ITEMSIZE, Config
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP
from kimi_pretrain.dep.pass_costs import Floats, sharing_ranks, stage_parameters, update_seconds
from kimi_pretrain.dep.timeline import Timeline
from kimi_pretrain.dep.vision_plan import VisionPlan
from kimi_pretrain.tools.predict import busiest_rank_tokens, token_bytes


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


def step_seconds(config: Config, line: Timeline, vision: VisionPlan, network: float) -> StepSeconds:
    """Return the parts of one step.

    Args:
        line: of the pipeline with text alone.
        vision: who encodes what, and in which bubbles.
        network: bytes a second that a rank sends, and receives.
    """
    passes = (line.end - line.start).sum(axis=1)
    inside, outside = vision.bubbles, outside_bubbles(vision)
    forward, later = vision_phases(config, outside)
    seconds = float((forward + later).max(initial=0.0))
    if inside is not None:
        seconds += inside.plan.upfront + inside.plan.after
    return StepSeconds(
        passes=float(passes.mean()),
        imbalance=float(passes.max() - passes.mean()),
        bubble=line.total - float(passes.max()),
        vision=seconds,
        exchange=sum(exchange_seconds(config, outside, network)),
        gradient_sum=float(backbone_sum_seconds(config, network).max())
        + encoder_sum_seconds(config, vision, network),
        update=update_seconds(config),
    )


def outside_bubbles(vision: VisionPlan) -> VisionPlan:
    """Return the plan of the items that are encoded before and behind the pipeline."""
    return vision if vision.bubbles is None else vision.together()


def vision_phases(config: Config, vision: VisionPlan) -> tuple[Floats, Floats]:
    """Return the seconds of each rank in the encoder's forward phase, and in the later one.

    Each rank's later phase costs a fixed multiple of its forward phase, so one rank is the slowest
    of both. Activations that `dep.keep_activations` keeps are counted as computed again.

    Returns:
        float64 [ranks] each.
    """
    seconds = vision.predicted_seconds()
    if config.dep.cost is not None:
        chunks = np.ceil(vision.patches_per_rank() / config.dep.max_patches_per_chunk)
        seconds = seconds + config.dep.cost.per_chunk * chunks
    forward = seconds / FORWARDS_PER_STEP
    forward_alone = "vision_tower" in config.train.frozen
    return forward, 0.0 * seconds if forward_alone else seconds - forward


def exchange_seconds(config: Config, vision: VisionPlan, network: float) -> tuple[float, float]:
    """Return the seconds of hand-over and hand-back; a frozen encoder has no hand-back."""
    if not len(vision.tokens):
        return 0.0, 0.0
    over = busiest_rank_tokens(vision) * token_bytes(config) / network
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


def backbone_sum_seconds(config: Config, network: float) -> Floats:
    """Return the seconds in which each stage sums its gradients, and gets weights back, [stages].

    Gradients go in float32 to the ranks that update them, and the updated weights to all others.
    """
    moved = np.zeros(config.layout.pp)
    if "language_model" in config.train.frozen:
        return moved
    for parameters, ranks in zip(stage_parameters(config), sharing_ranks(config), strict=True):
        moved = moved + parameters * (ranks - 1) / ranks
    size = ITEMSIZE[config.train.dtype]
    return moved * (max(4, size) + size) / network


def encoder_weights(config: Config) -> int:
    """Return the trained weights of tower and projector, biases and norms left out (0.2%)."""
    vision, frozen = config.model.vision, config.train.frozen
    width, joined = vision.width, 4 * vision.width
    block = 4 * width * width + 2 * width * vision.mlp_width
    tower = vision.depth * block + 3 * 14 * 14 * width + vision.pos_grid**2 * width
    projector = joined * vision.projector_width + vision.projector_width * vision.out_width
    return tower * ("vision_tower" not in frozen) + projector * ("projector" not in frozen)
