"""Predicts the pipeline passes with text only, including traffic between ranks. Pure.

Passes cost what `dep.pass_costs` says. Traffic of the layers is added, and overlaps with compute
only where the run overlaps it; the cost of memory settings is added, too (`memory_costs`). Ranks
that share a row are consecutive (`parallel.ranks`): if all are on one node they send at
`Traffic.node`, otherwise at `Traffic.network`.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kimi_pretrain.config import ITEMSIZE, Config
from kimi_pretrain.dep.pass_costs import (
    Floats,
    chunk_parts,
    operation_seconds,
    pass_seconds,
    products_backward,
    routed_seconds,
    up_projections,
)
from kimi_pretrain.dep.timeline import Schedule, Timeline, timeline
from kimi_pretrain.memory.kept import Tokens
from kimi_pretrain.tools.memory_costs import host_seconds, recompute_seconds, storage_seconds

# Exchanges of an expert layer, forward and backward: token counts, tokens, their weights, outputs.
EXCHANGES = 4, 3
HOST = 40e9  # bytes/s: 16 lanes of PCIe 5, less a third
NODE = 360e9  # bytes/s: NVLink of the fourth generation, one way, less a fifth
MEMORY = 2.5e12  # bytes/s: HBM3 of an H100, less a quarter


@dataclass(frozen=True)
class Traffic:
    """Assumed bandwidths between ranks, and to device memory, host memory and storage.

    Attributes:
        network: bandwidth of a rank between nodes, each way, bytes/s.
        latency: seconds of an exchange of a few bytes, added to each exchange of a pass.
        expert_imbalance: tokens at the busiest rank of an expert group over the mean, for a layer
            and microbatch; the other ranks wait for the busiest.
        node: bandwidth of a rank inside its node, each way, bytes/s.
        memory: bandwidth of device memory, reads and writes, bytes/s.
        host: bandwidth between a rank's device and host memory, each way, bytes/s.
        storage: bandwidth of a node to storage, each way, bytes/s; None: not known.
        save_stall: seconds that a save stalls training; None: computed from the other values.
    """

    network: float
    latency: float = 0.0
    expert_imbalance: float = 1.0
    node: float = NODE
    memory: float = MEMORY
    host: float = HOST
    storage: float | None = None
    save_stall: float | None = None

    def rate(self, config: Config, ranks: int) -> float:
        """Return the bandwidth of a ring inside a group of `ranks` consecutive ranks, bytes/s."""
        return self.network if config.dep.ranks_per_node % ranks else self.node


@dataclass(frozen=True)
class Pipeline:
    """The passes of a replica: their schedule and their costs.

    Attributes:
        forward, backward: seconds of a pass of each virtual stage, float64 [virtual stages].
        send: seconds from the end of a pass until the next stage has its result.
    """

    schedule: Schedule
    forward: Floats
    backward: Floats
    send: float

    def line(self, before: Floats | None = None) -> Timeline:
        """Return the timeline of the passes; `before` as in `dep.timeline.timeline`."""
        if before is None:
            passes = (tuple(one.tolist()) for one in (self.forward, self.backward))
            return _plain_line(self.schedule, *passes, send=self.send)
        return timeline(self.schedule, self.forward, self.backward, self.send, before)

    def least(self, cuts: int = 1) -> float:
        """Return a lower bound on the seconds of the pipeline, without a timeline.

        Each earlier stage has one forward pass before a stage's first pass, and one backward pass
        after its last.

        Args:
            cuts: number of parts into which a memory switch may cut a microbatch; it shortens these
                passes.
        """
        stages, both = self.schedule.stages, self.forward + self.backward
        own = self.schedule.microbatches * both.reshape(-1, stages).sum(axis=0)
        ahead = np.cumsum(both[:stages]) - both[:stages] + 2 * self.send * np.arange(stages)
        return float((own + ahead / cuts).max())


@lru_cache(maxsize=32)
def _plain_line(
    schedule: Schedule, forward: tuple[float, ...], backward: tuple[float, ...], send: float
) -> Timeline:
    """Return a timeline, cached for settings that do not change the passes."""
    return timeline(schedule, np.array(forward), np.array(backward), send)


def text_pipeline(config: Config, traffic: Traffic) -> Pipeline:
    """Return the passes of a replica with text only.

    The expert exchange overlaps with the compute of a pass under `layout.overlap_experts`;
    otherwise its time is added. The copies of `train.offload` overlap with everything.
    """
    layout, model = config.layout, config.model.language
    numbers = config.train.rows_per_microbatch * config.data.seq_len * model.hidden_size
    sent = numbers * ITEMSIZE[config.train.dtype] / (layout.cp * layout.tp)
    more = traffic.expert_imbalance if layout.ep > 1 else 1.0
    moved, layers = more * expert_bytes(config) / traffic.network, chunk_parts(config)[:, 2]
    waits = layers * traffic.latency * (layout.ep > 1)
    again, codes = (
        recompute_seconds(config, traffic.memory),
        storage_seconds(config, traffic.memory),
    )
    on_host, passes = host_seconds(config, traffic.host), list[Floats]()
    rows = shared_row_seconds(config, traffic)
    every = zip(pass_seconds(config), routed_seconds(config), EXCHANGES, rows, (0.0 * again, again))
    for whole, routed, count, shared, remade in every:
        seconds, experts = whole + (more - 1) * routed + remade + codes, moved + count * waits
        overlap = layout.overlap_experts
        one = np.maximum(seconds, experts) if overlap else seconds + experts
        passes.append(np.maximum(one + shared, on_host))
    schedule = Schedule(
        layout.pp, layout.vpp, config.num_microbatches(), ahead=layout.overlap_experts
    )
    return Pipeline(schedule, *passes, send=sent / traffic.network + traffic.latency)


@dataclass(frozen=True)
class _Gathers:
    """Traffic of tensor-parallel ranks in a pass of a layer, in numbers per token.

    Attributes:
        forward, backward: numbers in all-gathers and reduce-scatters, which cost the same.
        calls: number of exchanges, forward and backward.
    """

    forward: int
    backward: int
    calls: tuple[int, int]


def _gathers(config: Config) -> _Gathers:
    """Return the tensor-parallel traffic of a layer, without the latents of shared rows.

    Inputs of sharded projections are all-gathered, and outputs are reduce-scattered. The backward
    pass reverses both, and gathers inputs again for weight gradients and for recomputed
    up-projections. MLP and shared experts are sharded the same way.
    """
    model, train = config.model.language, config.train
    hidden, shared = model.hidden_size, config.layout.cp > 1
    queries = hidden if model.q_lora_rank is None else model.q_lora_rank
    keys = 0 if shared else model.kv_lora_rank  # `shared_row_seconds` counts those of shared rows
    rotary = 0 if shared else model.qk_rope_dim
    inputs = queries + keys + hidden  # of queries, of keys and values, of the MLP
    count = 3 - shared
    forward = inputs + rotary + 2 * hidden  # outputs of attention and of the MLP
    backward, calls = forward, (count + 3 - shared, count + 3 - shared)
    if "language_model" not in train.frozen:
        backward, calls = backward + inputs, (calls[0], calls[1] + count)
    if "mla_up" in train.recompute:
        backward, calls = backward + queries + keys, (calls[0], calls[1] + count - 1)
    return _Gathers(forward, backward, calls)


def shared_row_seconds(config: Config, traffic: Traffic) -> tuple[Floats, Floats]:
    """Return the seconds that sharing rows adds to passes, float64 [virtual stages] each.

    Tensor-parallel ranks exchange in every layer, before the head and after the embedding.
    Context-parallel ranks gather the latents of keys and values, sum their gradients in float32,
    and up-project the whole row, again in the backward pass. None of it overlaps with compute.
    """
    layout, model, parts = config.layout, config.model.language, chunk_parts(config)
    item, tokens = ITEMSIZE[config.train.dtype], Tokens.of(config)
    layers, hidden = parts[:, 1] + parts[:, 2], tokens.cp * model.hidden_size * item
    forward, backward = np.zeros(len(parts)), np.zeros(len(parts))
    trained = "language_model" not in config.train.frozen
    if layout.tp > 1:
        share, found = (layout.tp - 1) / layout.tp, _gathers(config)
        number = share * item * tokens.cp / traffic.rate(config, layout.tp)
        ends = share * hidden / traffic.rate(config, layout.tp)
        forward += layers * (found.forward * number + found.calls[0] * traffic.latency)
        backward += layers * (found.backward * number + found.calls[1] * traffic.latency)
        forward += (parts[:, 0] + parts[:, 3]) * (ends + traffic.latency)
        # The embedding gathers no input again, and a frozen embedding has no gradient.
        back = trained * parts[:, 0] + (1 + trained) * parts[:, 3]
        backward += back * (ends + traffic.latency)
    if layout.cp > 1:
        once, wide = (
            _row_seconds(config, traffic, item),
            _row_seconds(config, traffic, max(4, item)),
        )
        forward += layers * once
        backward += layers * (wide + once * ("mla_up" in config.train.recompute))
        _, keys = up_projections(model)
        project = 2.0 * keys * tokens.row / layout.tp * operation_seconds(config)
        more = project * (1 - 1 / layout.cp)  # in addition to the rank's own tokens
        forward += layers * more
        backward += layers * (products_backward(config) * more + project)
    return forward, backward


def _row_seconds(config: Config, traffic: Traffic, item: int) -> float:
    """Return the seconds to gather, or to sum, a row's latents and rotary keys.

    Ranks of a context-parallel group gather their tensor-parallel part, then tensor-parallel ranks
    exchange the parts.

    Args:
        item: bytes per number.
    """
    layout, model, tokens = config.layout, config.model.language, Tokens.of(config)
    size = tokens.row * (model.kv_lora_rank + model.qk_rope_dim) * item
    cp = size / layout.tp * (layout.cp - 1) / layout.cp
    seconds = cp / traffic.rate(config, layout.cp * layout.tp) + traffic.latency
    if layout.tp > 1:
        tp = size * (layout.tp - 1) / layout.tp
        seconds += tp / traffic.rate(config, layout.tp) + traffic.latency
    return seconds


def expert_bytes(config: Config) -> Floats:
    """Return the bytes that a rank sends to other nodes in a pass, to experts and back.

    A copy of each token goes to each of its experts, which are assumed to be drawn evenly. Copies
    to ranks of the expert group on the same node cost nothing.

    Returns:
        float64 [virtual stages].
    """
    layout, model = config.layout, config.model.language
    near = min(config.dep.ranks_per_node, layout.ep)
    tokens = config.train.rows_per_microbatch * config.data.seq_len / (layout.cp * layout.tp)
    copies = 2 * tokens * model.experts_per_token * (1 - near / layout.ep)
    layer = copies * model.hidden_size * ITEMSIZE[config.train.dtype]
    dense = model.num_dense_layers
    chunks = [sum(one >= dense for one in layers) for layers, _ in config.chunks()]
    return layer * np.array(chunks, np.float64)
