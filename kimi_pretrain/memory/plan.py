"""Plans the memory of every rank of a run from names, shapes and counts, before it is built.

The peak memory of a rank is

    weights + gradients + optimizer state + vision embeddings + the largest of four phases:
    encoder     activations of one chunk of media
    exchange    embeddings on their way to first stages, or their gradients back
    backbone    activations of all microbatches in flight, temporaries, the encoder's if kept
    update      staging of updated weights

State is divided among the owners that the run itself would choose (`optim.owners`). Microbatches in
flight follow from the pipeline schedule, and activations from `kept`. The plan leaves out CUDA's
context and NCCL's buffers (1 to 3 GiB), fragmentation, and uneven loads of experts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kimi_pretrain.config import GIB, ITEMSIZE, MIB, Config
from kimi_pretrain.memory.kept import Kept, Tokens, head_tensors, layer_tensors, row_bytes
from kimi_pretrain.memory.states import Sizes, divide_config
from kimi_pretrain.memory.switches import Change, changed, switches
from kimi_pretrain.siglip.counts import pooling_bytes, text_bytes
from kimi_pretrain.tools.optimizer_division import Division
from moonvit3d.geometry import MAX_FRAMES, MERGE
from moonvit3d.memory import activation_bytes, begin_bytes, frozen_tower_bytes, most_patches


@dataclass(frozen=True)
class StageMemory:
    """Memory of the fullest rank of a pipeline stage, in bytes.

    Attributes:
        stage: pipeline stage.
        rank: global number of its fullest rank.
        layers: decoder layers of the stage, global numbers from 0.
        in_flight: for each chunk of the rank, microbatches whose activations are held at the peak.
        weights, gradients, optimizer: of language model and encoder.
        activations: by kind, for all microbatches in flight, on the device.
        host: activations in host memory (`train.offload`).
        embeddings: embeddings of the media of waiting microbatches, and their gradients.
        waiting: activations of the encoder that are kept until its backward pass
            (`dep.keep_activations`), and the outputs of a frozen tower for a trained projector.
            With `dep.bubbles` all of `encoder`, because media are encoded between the passes.
        passing: temporaries of one layer: recomputed tensors, tokens sent to experts and back, or
            the logits of the loss.
        encoder: activations of the largest chunk of media, and of kept chunks.
        exchange: embeddings or gradients being reordered, and buffers of one exchange round.
        update: staging of weights that are broadcast.
    """

    stage: int
    rank: int
    layers: tuple[int, ...]
    in_flight: tuple[int, ...]
    weights: int
    gradients: int
    optimizer: int
    activations: Counter[str] = field(hash=False)
    host: int
    embeddings: int
    waiting: int
    passing: int
    encoder: int
    exchange: int
    update: int

    @property
    def lasting(self) -> int:
        """Bytes held in every phase."""
        return self.weights + self.gradients + self.optimizer

    @property
    def phases(self) -> dict[str, int]:
        """Bytes that each phase adds to `lasting`; phases do not overlap."""
        return {
            "backbone": self.embeddings + self.activations.total() + self.passing + self.waiting,
            "encoder": self.embeddings + self.encoder,
            "exchange": self.embeddings + self.exchange + self.waiting,
            "update": self.update,
        }

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.lasting + max(self.phases.values())

    @property
    def fullest_phase(self) -> str:
        """The phase of the peak."""
        phases = self.phases
        return max(phases, key=lambda name: phases[name])


@dataclass(frozen=True)
class Switch:
    """One change of the configuration, and the peak of the fullest rank with it."""

    setting: str
    peak: int


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run.

    Attributes:
        stages: the fullest rank of each stage.
        switches: single changes that lower the peak, the least costly first.
    """

    stages: tuple[StageMemory, ...]
    switches: tuple[Switch, ...]

    @property
    def fullest(self) -> StageMemory:
        """The stage with the fullest rank."""
        return max(self.stages, key=lambda stage: (stage.peak, -stage.stage))


def plan_memory(config: Config, division: Division | None = None) -> MemoryPlan:
    """Return the memory of every stage, and the single switches that lower its peak.

    Args:
        division: of the optimizer's state; None computes it, which takes seconds for a trillion
            parameters.
    """
    division, sizes = division or divide_config(config), Sizes.of(config)
    stages = stages_of(config, division, sizes)
    peak = max(stage.peak for stage in stages)
    found = (
        Switch(str(change), max(stage.peak for stage in stages_of(other, division, sizes)))
        for change, other in single_changes(config)
    )
    return MemoryPlan(stages, tuple(switch for switch in found if switch.peak < peak))


def single_changes(config: Config) -> Iterator[tuple[Change, Config]]:
    """Yield the single changes that may lower the peak, least costly first, with their configs."""
    for levels in switches(config):
        for change in levels:
            yield change, changed(config, [change])


def host_bytes(config: Config) -> list[int]:
    """Return, for each stage, the bytes that each of its ranks holds in host memory."""
    chunks, pp, kept = config.chunks(), config.layout.pp, _of_layers(config)
    return [_activations(config, chunks[stage::pp], stage, kept)[2] for stage in range(pp)]


def moved_bytes(config: Config) -> list[int]:
    """Return the bytes that each chunk offloads per microbatch, [virtual stages]."""
    if not config.train.offload:
        return [0 for _ in config.chunks()]
    kept = _of_layers(config)
    return [
        sum(
            one.size
            for group in _layers(config, *chunk, kept)
            for one in group
            if moves(config, one)
        )
        for chunk in config.chunks()
    ]


def microbatches_in_flight(config: Config, stage: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return the number of microbatches that each chunk of a stage holds at the stage's peak.

    Follows Megatron-Core's 1F1B schedule: some warm-up forward passes, then one forward and one
    backward pass in turn; with virtual stages, chunk after chunk in groups of pp microbatches. With
    expert overlap, a forward and a backward pass run together after one more warm-up pass.

    Args:
        weights: bytes that each chunk keeps per microbatch.
    """
    layout, total = config.layout, config.num_microbatches() * config.layout.vpp
    behind = layout.pp - stage - 1
    warmup = behind if layout.vpp == 1 else 2 * behind + (layout.vpp - 1) * layout.pp
    warmup = min(total, warmup + layout.overlap_experts)

    def chunk(number: int) -> int:
        return number // layout.pp % layout.vpp

    held, best = [0] * layout.vpp, (0,) * layout.vpp
    # The steady state repeats after one round of all chunks, so one round contains the peak.
    for forward in range(min(total, warmup + layout.pp * layout.vpp)):
        held[chunk(forward)] += 1
        if _weigh(held, weights) > _weigh(best, weights):
            best = tuple(held)
        if forward >= warmup:
            held[layout.vpp - 1 - chunk(forward - warmup)] -= 1
    return best


def _weigh(held: Sequence[int], weights: Sequence[int]) -> int:
    return sum(count * weight for count, weight in zip(held, weights, strict=True))


def stages_of(config: Config, division: Division | None, sizes: Sizes) -> tuple[StageMemory, ...]:
    """Return the memory of every stage's fullest rank.

    Args:
        division: of the optimizer's state; None uses a lower bound.
    """
    layout, item = config.layout, ITEMSIZE[config.train.dtype]
    frozen, encoder = "language_model" in config.train.frozen, sizes.encoder
    per_stage = layout.world_size() // layout.pp
    chunks, kept, passing = config.chunks(), _of_layers(config), _passing_of_layers(config)
    found = []
    for stage in range(layout.pp):
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        rank, state, update = ranks[0], sizes.state[stage], 0
        if division is not None:
            loads = division.loads
            rank = max(ranks, key=lambda rank: (loads[rank].state_bytes, -rank))
            state, update = loads[rank].state_bytes, _update(config, division, rank)
        own = chunks[stage :: layout.pp]
        held, activations, host = _activations(config, own, stage, kept)
        own_elements = sum(sizes.stages[stage])
        found.append(
            StageMemory(
                stage=stage,
                rank=rank,
                layers=tuple(sorted(layer for layers, _ in own for layer in layers)),
                in_flight=held,
                weights=item * (own_elements + encoder[0]),
                gradients=max(4, item) * (own_elements * (not frozen) + encoder[1]),
                optimizer=state + _deepspeed(config, encoder[1]),
                activations=activations,
                host=host,
                embeddings=_embeddings(config, stage),
                waiting=_waiting(config),
                passing=_passing(config, own, passing),
                encoder=_encoder(config),
                exchange=_exchange(config, stage),
                update=update,
            )
        )
    return tuple(found)


OfLayers = dict[bool, list[Kept]]
"""Tensors that a layer keeps of a microbatch, keyed by True for a dense layer, else False."""


def _of_layers(config: Config) -> OfLayers:
    return {dense: list(layer_tensors(config, dense)) for dense in (False, True)}


def _layers(config: Config, layers: range, has_loss: bool, kept: OfLayers) -> Iterator[list[Kept]]:
    """Yield the tensors kept of a chunk's microbatch, layer by layer, then those of the loss."""
    num_dense = config.model.language.num_dense_layers
    for layer in layers:
        yield kept[layer < num_dense]
    if has_loss:
        yield list(head_tensors(config))


def moves(config: Config, tensor: Kept) -> bool:
    """Return whether `train.offload` moves a kept tensor to host memory."""
    train = config.train
    return train.offload and tensor.moves and tensor.size >= train.offload_min_mib * MIB


def _activations(
    config: Config, chunks: Sequence[tuple[range, bool]], stage: int, kept: OfLayers
) -> tuple[tuple[int, ...], Counter[str], int]:
    """Return microbatches in flight by chunk, bytes on the device by kind, and bytes on the host.

    With `train.offload` four layers are on the device: two being offloaded, one in use, and one
    being loaded.
    """
    groups = [list(_layers(config, *chunk, kept)) for chunk in chunks]
    held = microbatches_in_flight(
        config, stage, [sum(t.size for group in chunk for t in group) for chunk in groups]
    )
    device: Counter[str] = Counter()
    host, largest = 0, 0
    for count, chunk in zip(held, groups, strict=True):
        for group in chunk:
            moved = 0
            for tensor in group:
                if moves(config, tensor):
                    moved += tensor.size
                else:
                    device[tensor.kind] += count * tensor.size
            host, largest = host + count * moved, max(largest, moved)
    if config.train.offload:
        device["layers on their way"] = min(host, 4 * largest)
    return held, device, host


def _embeddings(config: Config, stage: int) -> int:
    """Return the bytes of vision embeddings and their gradients that a rank holds."""
    encoded, received = _media_bytes(config)
    if stage > 0 or config.dep.offload_outputs:
        return encoded  # the rank's own outputs until they are sent, later their gradients
    return 2 * received + encoded


def media_share(config: Config) -> float | None:
    """Return the largest scheduled share of media among the tokens; None if none is given."""
    data = config.data
    ratios = (data.vision_token_ratio, *(stage.vision_token_ratio for stage in data.schedule))
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _media_tokens(config: Config) -> int:
    """Return the media tokens of a step's global batch; 0 if no share of media is given."""
    return int((media_share(config) or 0.0) * config.tokens_per_step())


def _media_bytes(config: Config) -> tuple[int, int]:
    """Return the bytes of embeddings that a rank encodes, and that a first-stage rank receives,
    assuming an even spread.
    """
    layout, item = config.layout, ITEMSIZE[config.train.dtype]
    tokens = _media_tokens(config)
    ranks = layout.world_size(), layout.world_size() // layout.pp
    encoded, received = (-(-tokens // n) * config.model.language.hidden_size * item for n in ranks)
    return encoded, received


def _passing_of_layers(config: Config) -> dict[bool, int]:
    """Return the bytes of a layer's temporaries, keyed by True for a dense layer."""
    language, tokens = config.model.language, Tokens.of(config)
    item = ITEMSIZE[config.train.dtype]
    without = config.replace(train=config.train.replace(recompute=[], fp8_storage=False))
    found: dict[bool, int] = {}
    for dense in (False, True):
        plain, kept = (
            sum(tensor.size for tensor in layer_tensors(some, dense)) for some in (without, config)
        )
        remade = plain - kept + row_bytes(config)
        # Sent and received tokens, in two orders each, in the forward and in the backward pass.
        sent = 0 if dense else 4 * tokens.part * language.experts_per_token
        found[dense] = remade + sent * language.hidden_size * item
    return found


def _passing(
    config: Config, chunks: Sequence[tuple[range, bool]], of_layers: dict[bool, int]
) -> int:
    """Return the peak bytes of temporaries of one layer, or of the loss."""
    language, tokens = config.model.language, Tokens.of(config)
    item = ITEMSIZE[config.train.dtype]
    most = 0
    for layers, has_loss in chunks:
        for dense in {layer < language.num_dense_layers for layer in layers}:
            most = max(most, of_layers[dense])
        if has_loss:  # logits in the model's type, and their gradient in both types
            logits = tokens.cp * language.vocab_size // config.layout.tp
            most = max(most, logits * (2 * item + max(4, item)))
    return most


def _encoder(config: Config) -> int:
    """Return the peak activation bytes of the encoder phase: a chunk of media, or the texts of
    `train.siglip`, which run before the encoder's backward pass; both with the kept chunks.
    """
    dep, train, vision = config.dep, config.train, config.model.vision
    most, frozen = dep.max_patches_per_chunk, "vision_tower" in train.frozen
    if config.in_bubbles():  # item by item
        most = min(most, most_patches(config.data.limits))
    item, half = ITEMSIZE[train.dtype], -(-most // 2)
    of_chunk = frozen_tower_bytes if frozen else activation_bytes
    by_blocks = config.in_bubbles() and not frozen
    at_once = vision.replace(depth=1) if by_blocks else vision
    chunk = int(of_chunk([(1, 2, half)], at_once, item)[0])
    if by_blocks:  # in addition, the inputs of all blocks for a rank's media
        tokens = -(-_media_tokens(config) // config.layout.world_size())
        chunk += begin_bytes(tokens * MERGE**2 * MAX_FRAMES, vision, item)
    if dep.keep_activations == "auto":  # chunks are kept up to the limit
        chunk = _room(config)
    elif dep.memory_limit_gib is not None:
        chunk = min(chunk, _room(config))
    if train.siglip is None:
        return chunk + _features(config)
    kept = chunk if dep.keep_activations == "auto" else 0
    pooled = chunk + pooling_bytes(2 * half, vision.width, item)
    return max(pooled, kept + text_bytes(train.siglip, vision.width, item))


def _features(config: Config) -> int:
    """Return the bytes of frozen-tower outputs kept for a trained projector's backward pass."""
    frozen, vision = config.train.frozen, config.model.vision
    if "vision_tower" not in frozen or "projector" in frozen:
        return 0
    tokens = -(-_media_tokens(config) // config.layout.world_size())
    return tokens * MERGE**2 * vision.width * ITEMSIZE[config.train.dtype]


def _room(config: Config) -> int:
    assert config.dep.memory_limit_gib is not None
    return int(config.dep.memory_limit_gib * GIB)


def _waiting(config: Config) -> int:
    if config.in_bubbles():
        return _encoder(config)
    kept = _room(config) if config.dep.keep_activations == "auto" else 0
    return kept + _features(config)


def _exchange(config: Config, stage: int) -> int:
    """Return the temporary bytes of the hand-over or the hand-back."""
    encoded, received = _media_bytes(config)
    # Outputs, concatenated or reordered; on a first stage also all received embeddings, before
    # they become leaves of the microbatches.
    once_more = encoded + (received if stage == 0 else 0)
    return once_more + 2 * config.dep.exchange_budget_mib * MIB


def _deepspeed(config: Config, trained: int) -> int:
    """Return the bytes of DeepSpeed's fp32 copy of the encoder, and of a rank's shards.

    The shards are master weights, two moments, and the gradient as received and as used. They come
    on top of the owners' tensors.
    """
    if config.optim.deepspeed is None:
        return 0
    return 4 * trained + 5 * 4 * -(-trained // config.layout.world_size())


def _update(config: Config, division: Division, rank: int) -> int:
    """Return the bytes of two rounds of buckets that a rank sends and receives in the update."""
    most, item = 0, ITEMSIZE[config.train.dtype]
    for group in division.groups:
        if rank in group.ranks and len(group.ranks) > 1 and config.optim.shard_state:
            bucket = 2 * len(group.ranks) * config.optim.bucket_elements
            most = max(most, min(bucket, sum(tensor.elements for tensor in group.tensors)))
    return most * item
