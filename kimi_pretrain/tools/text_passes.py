"""What the passes of a pipeline take with text alone, traffic between ranks included. Pure.

Passes cost what `dep.pass_costs` says; what layers send to other ranks is added, and hidden behind
the computing only where the run hides it, and so is what settings of memory cost (`memory_costs`).
Ranks that share a row are neighbours (`parallel.ranks`): where all are on one node they send at
`Traffic.node`, elsewhere at `Traffic.network`.
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

# Of an expert layer, forward and backward: numbers of tokens, tokens, their weights, outputs.
EXCHANGES = 4, 3
HOST = 40e9  # bytes/s: 16 lanes of PCIe 5, less a third
NODE = 360e9  # bytes/s: NVLink of the fourth generation, one way, less a fifth
MEMORY = 2.5e12  # bytes/s: HBM3 of an H100, less a quarter


@dataclass(frozen=True)
class Traffic:
    """What is told of the traffic between ranks, and with host memory and storage.

    Attributes:
        network: bytes a second that a rank sends, and receives.
        latency: seconds of an exchange of a few bytes; counted where passes exchange.
        expert_imbalance: tokens that come to the busiest rank of an expert group over the mean,
            of a layer and microbatch: the others wait for it.
        node: bytes a second that a rank sends, and receives, inside its node.
        memory: bytes a second that a device reads and writes of its own memory.
        host: bytes a second between a rank's device and its host's memory, each way.
        storage: bytes a second of a node, each way; None: not known.
        save_stall: seconds that a save holds the training up; None: they follow from the others.
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
        """Return the bytes a second of a ring over ranks that lie among so many neighbours."""
        return self.network if config.dep.ranks_per_node % ranks else self.node


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
        if before is None:
            passes = (tuple(one.tolist()) for one in (self.forward, self.backward))
            return _plain_line(self.schedule, *passes, send=self.send)
        return timeline(self.schedule, self.forward, self.backward, self.send, before)

    def least(self, cuts: int = 1) -> float:
        """Return seconds that the passes take at least, without a timeline.

        Before the first pass of a stage those before it have one, and behind its last one, too.

        Args:
            cuts: into which microbatches may be cut, so that these passes are shorter.
        """
        stages, both = self.schedule.stages, self.forward + self.backward
        own = self.schedule.microbatches * both.reshape(-1, stages).sum(axis=0)
        ahead = np.cumsum(both[:stages]) - both[:stages] + 2 * self.send * np.arange(stages)
        return float((own + ahead / cuts).max())


@lru_cache(maxsize=32)
def _plain_line(
    schedule: Schedule, forward: tuple[float, ...], backward: tuple[float, ...], send: float
) -> Timeline:
    """Return a timeline, made once for settings that do not change the passes."""
    return timeline(schedule, np.array(forward), np.array(backward), send)


def text_pipeline(config: Config, traffic: Traffic) -> Pipeline:
    """Return the passes of a replica with text alone.

    Tokens travel to experts and back while the pass computes where `layout.overlap_experts` has it
    so, and before and behind it elsewhere. What `train.offload` moves travels beside everything.
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
    """What tensor-parallel ranks send in a pass of a layer, as numbers a token.

    Attributes:
        forward, backward: gathered, or summed and scattered: as much travels either way.
        calls: how many exchanges that are, forward and backward.
    """

    forward: int
    backward: int
    calls: tuple[int, int]


def _gathers(config: Config) -> _Gathers:
    """Return what tensor parallelism sends of a layer, beside the latents of shared rows.

    Inputs of cut projections are gathered, and outputs summed where the next part has its own
    tokens; gradients go the other way, and inputs are gathered again for gradients of weights, and
    to project up again. MLP and shared experts are cut alike.
    """
    model, train = config.model.language, config.train
    hidden, shared = model.hidden_size, config.layout.cp > 1
    queries = hidden if model.q_lora_rank is None else model.q_lora_rank
    keys = 0 if shared else model.kv_lora_rank  # of a shared row: `shared_row_seconds`
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
    """Return what passes take longer because ranks share rows, float64 [virtual stages] each.

    Tensor-parallel ranks exchange in every layer, before the head and behind the embedding;
    context-parallel ones gather latents of keys and values, sum their gradients in float32, and
    project the whole row up, in the backward pass again. Nothing of it is hidden.
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
        # Of the embedding no input is gathered again, and a frozen one has no gradient.
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
        more = project * (1 - 1 / layout.cp)  # than for the rank's own tokens
        forward += layers * more
        backward += layers * (products_backward(config) * more + project)
    return forward, backward


def _row_seconds(config: Config, traffic: Traffic, item: int) -> float:
    """Return the seconds in which a row's latents and rotary keys are gathered, or summed.

    Context-parallel ranks gather those of their tensor-parallel part, then these put them together.

    Args:
        item: bytes of a number.
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
