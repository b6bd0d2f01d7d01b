"""What the passes of a pipeline take with text alone, traffic between ranks included. Pure.

Passes cost what `dep.pass_costs` says; what layers send to other ranks is added, and hidden behind
the computing only where the run hides it.
"""

from dataclasses import dataclass

import numpy as np

from kimi_pretrain.config import ITEMSIZE, Config
from kimi_pretrain.dep.pass_costs import Floats, chunk_parts, pass_seconds, routed_seconds
from kimi_pretrain.dep.timeline import Schedule, Timeline, timeline

# Of an expert layer, forward and backward: numbers of tokens, tokens, their weights, outputs.
EXCHANGES = 4, 3
HOST = 40e9  # bytes/s: 16 lanes of PCIe 5, less a third


@dataclass(frozen=True)
class Traffic:
    """What is told of the traffic between ranks, and with host memory and storage.

    Attributes:
        network: bytes a second that a rank sends, and receives.
        latency: seconds of an exchange of a few bytes; counted where passes exchange.
        expert_imbalance: tokens that come to the busiest rank of an expert group over the mean,
            of a layer and microbatch: the others wait for it.
        host: bytes a second between a rank's device and its host's memory, each way.
        storage: bytes a second of a node, each way; None: not known.
        save_stall: seconds that a save holds the training up; None: they follow from the others.
    """

    network: float
    latency: float = 0.0
    expert_imbalance: float = 1.0
    host: float = HOST
    storage: float | None = None
    save_stall: float | None = None


@dataclass(frozen=True)
class Pipeline:
    """The passes of a replica: their schedule, and what they cost.

    Attributes:
        forward, backward: seconds of a pass of each virtual stage, float64 [virtual stages].
        send: seconds from the end of a pass until its result is on another stage.
    """

    schedule: Schedule
    forward: Floats
    backward: Floats
    send: float

    def line(self, before: Floats | None = None) -> Timeline:
        """Return when the passes run; `before` as in `dep.timeline.timeline`."""
        return timeline(self.schedule, self.forward, self.backward, self.send, before)


def text_pipeline(config: Config, traffic: Traffic) -> Pipeline:
    """Return the passes of a replica with text alone.

    Tokens travel to experts and back while the pass computes where `layout.overlap_experts` has it
    so, and before and behind it elsewhere.
    """
    layout, model = config.layout, config.model.language
    numbers = config.train.rows_per_microbatch * config.data.seq_len * model.hidden_size
    sent = numbers * ITEMSIZE[config.train.dtype] / (layout.cp * layout.tp)
    more = traffic.expert_imbalance if layout.ep > 1 else 1.0
    moved, layers = more * expert_bytes(config) / traffic.network, chunk_parts(config)[:, 2]
    waits = layers * traffic.latency * (layout.ep > 1)
    passes: list[Floats] = []
    every = zip(pass_seconds(config), routed_seconds(config), EXCHANGES, strict=True)
    for whole, routed, count in every:
        seconds, experts = whole + (more - 1) * routed, moved + count * waits
        overlap = layout.overlap_experts
        passes.append(np.maximum(seconds, experts) if overlap else seconds + experts)
    schedule = Schedule(
        layout.pp, layout.vpp, config.num_microbatches(), ahead=layout.overlap_experts
    )
    return Pipeline(schedule, *passes, send=sent / traffic.network + traffic.latency)


def expert_bytes(config: Config) -> Floats:
    """Return what a rank sends to other nodes in a pass, to experts and back, [virtual stages].

    A copy of each token for each of its experts, which are taken to be drawn evenly: of the ranks
    of its expert group those on its node get theirs for nothing.
    """
    layout, model = config.layout, config.model.language
    near = min(config.dep.ranks_per_node, layout.ep)
    tokens = config.train.rows_per_microbatch * config.data.seq_len / (layout.cp * layout.tp)
    copies = 2 * tokens * model.experts_per_token * (1 - near / layout.ep)
    layer = copies * model.hidden_size * ITEMSIZE[config.train.dtype]
    dense = model.num_dense_layers
    chunks = [sum(one >= dense for one in layers) for layers, _ in config.chunks()]
    return layer * np.array(chunks, np.float64)
