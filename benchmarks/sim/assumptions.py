"""What the simulation takes for granted about the machines. Everything else is counted."""

from dataclasses import dataclass

from kimi_pretrain.config import Config
from kimi_pretrain.tools.step_parts import encoder_weights


@dataclass(frozen=True)
class Assumptions:
    """Speeds of one rank; none was measured at this size.

    Attributes:
        peak_flops: dense bfloat16 operations a second (H800).
        backbone_efficiency: part of the peak that the language model reaches inside a pass, what
            its expert exchange costs included.
        encoder_efficiency: part of the peak that the encoder reaches.
        network: bytes a second that a rank sends, and receives, between nodes (400 Gb/s, 80% of
            it).
        node_network: the same inside a node (200 GB/s, 80% of it).
        ranks_per_node: ranks of a node.
        phase_seconds: launches and waiting at each of the two vision phases.
        gradient_overlap: part of the sum of the encoder's gradients that is hidden behind the last
            chunk's backward pass.
        attention_backward: what attention's backward pass costs, in forwards. Fused kernels compute
            the logits again there: 2.5.
        equal_chunks: the pipeline's chunks cost the same, whatever `layout.stages` says.
        split_efficiency: what ranks that share an item keep of their speed; None is as planned.
        cost_scatter: how far an item's true cost is off what its operations say, as the standard
            deviation of its logarithm.
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
        """Operations a second of the language model."""
        return self.peak_flops * self.backbone_efficiency

    @property
    def encoder_flops(self) -> float:
        """Operations a second of the encoder."""
        return self.peak_flops * self.encoder_efficiency


def gradient_sum_seconds(config: Config, assumed: Assumptions) -> float:
    """Return the exposed seconds of summing the encoder's gradients over all ranks, in float32.

    A reduce-scatter inside the node, a ring between nodes of an eighth for each rank, and back.
    """
    size = 4.0 * encoder_weights(config)
    per_node = min(assumed.ranks_per_node, config.layout.world_size())
    nodes = config.layout.world_size() / per_node
    inside = 2 * size * (per_node - 1) / per_node / assumed.node_network
    between = 2 * size / per_node * (nodes - 1) / nodes / assumed.network
    return (inside + between) * (1 - assumed.gradient_overlap)
