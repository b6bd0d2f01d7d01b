"""Assumed machine speeds of the simulation. Everything else is counted."""

from dataclasses import dataclass

from kimi_pretrain.config import Config
from kimi_pretrain.tools.step_parts import encoder_weights


@dataclass(frozen=True)
class Assumptions:
    """Speeds of one rank; none was measured at this size.

    Attributes:
        peak_flops: dense bfloat16 FLOP/s (H800).
        backbone_efficiency: fraction of the peak that the language model reaches inside a pass,
            including the cost of its expert exchange.
        encoder_efficiency: fraction of the peak that the encoder reaches.
        network: bytes per second that a rank sends, and receives, between nodes (80% of 400 Gb/s).
        node_network: the same inside a node (80% of 200 GB/s).
        ranks_per_node: ranks of a node.
        phase_seconds: launch and wait time of each of the two vision phases.
        gradient_overlap: fraction of the encoder's gradient sum that is hidden behind the last
            chunk's backward pass.
        attention_backward: cost of attention's backward pass in forward passes. Fused kernels
            recompute the logits there: 2.5.
        equal_chunks: True if all pipeline chunks cost the same, regardless of `layout.stages`.
        split_efficiency: fraction of their speed that ranks keep when they share an item; None
            means as planned.
        cost_scatter: standard deviation of the logarithm of an item's true cost over the cost that
            follows from its operations.
    """

    peak_flops: float = 989e12
    backbone_efficiency: float = 0.40
    encoder_efficiency: float = 0.30
    network: float = 0.8 * 50e9
    node_network: float = 0.8 * 200e9
    ranks_per_node: int = 8
    phase_seconds: float = 0.005
    gradient_overlap: float = 0.0
    attention_backward: float = 2.0
    equal_chunks: bool = False
    split_efficiency: float | None = None
    cost_scatter: float = 0.0

    @property
    def backbone_flops(self) -> float:
        """FLOP/s of the language model."""
        return self.peak_flops * self.backbone_efficiency

    @property
    def encoder_flops(self) -> float:
        """FLOP/s of the encoder."""
        return self.peak_flops * self.encoder_efficiency


def gradient_sum_seconds(config: Config, assumed: Assumptions) -> float:
    """Return the exposed seconds of summing the encoder's gradients over all ranks, in float32.

    The sum is a reduce-scatter inside the node, a ring between nodes over each rank's part (an
    eighth), and an all-gather inside the node.
    """
    size = 4.0 * encoder_weights(config)
    per_node = min(assumed.ranks_per_node, config.layout.world_size())
    nodes = config.layout.world_size() / per_node
    inside = 2 * size * (per_node - 1) / per_node / assumed.node_network
    between = 2 * size / per_node * (nodes - 1) / nodes / assumed.network
    return (inside + between) * (1 - assumed.gradient_overlap)
