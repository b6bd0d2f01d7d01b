"""The memory of every rank of a run, before anything is built: names, shapes and counts.

What a rank holds at once is

    weights + gradients + optimizer state + the largest of three phases:
    backbone    activations of all microbatches in flight, vision embeddings, what is passing
    encoder     activations of one chunk of media, embeddings, exchange buffers
    update      staging of updated weights

State is divided among the owners that the run itself would choose (`optim.owners`); microbatches
in flight are those of the pipeline schedule; activations those of `kept`. Not in it: CUDA's context
and NCCL's buffers (1 to 3 GiB), fragmentation, and experts that get more tokens than others.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from kimi_pretrain.config import GIB, ITEMSIZE, MIB, Config
from kimi_pretrain.memory.kept import (
    Kept,
    Tokens,
    head_tensors,
    layer_tensors,
)
from kimi_pretrain.optim.groups import ModelShape, replicas_of
from kimi_pretrain.optim.owners import TensorSize
from kimi_pretrain.parallel.layout import expand_stages
from kimi_pretrain.tools.optimizer_division import Division, PlannedGroup, divide, stage_groups
from kimi_pretrain.weights.shapes import BIAS, LANGUAGE, is_routed_expert, language_shapes
from moonvit3d.layouts import released_shapes
from moonvit3d.memory import activation_bytes

_Shapes = list[tuple[str, tuple[int, ...]]]

EVERYTHING = ["norms", "swiglu", "mla_up"]


@dataclass(frozen=True)
class StageMemory:
    """What the fullest rank of a pipeline stage holds, in bytes.

    Attributes:
        stage: pipeline stage.
        rank: its fullest rank, of the whole job.
        layers: decoder layers of the stage, global numbers from 0.
        in_flight: of each chunk of the rank, microbatches whose activations are held at the peak.
        weights, gradients, optimizer: of language model and encoder.
        activations: by kind, all microbatches in flight, on the device.
        host: those in host memory (`train.offload`).
        embeddings: of the media that its microbatches wait with, and their gradients.
        passing: what one layer makes and drops: tensors that are recomputed, tokens on their way
            to experts and back, or the logits of the loss.
        encoder: activations of the largest chunk of media and buffers of the exchange.
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
    passing: int
    encoder: int
    update: int

    @property
    def lasting(self) -> int:
        """Bytes that are there in every phase."""
        return self.weights + self.gradients + self.optimizer

    @property
    def backbone(self) -> int:
        """Bytes of the backbone's phase beside those."""
        return self.activations.total() + self.embeddings + self.passing

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return self.lasting + max(self.backbone, self.embeddings + self.encoder, self.update)


@dataclass(frozen=True)
class Switch:
    """One change of the configuration, and the peak of the fullest rank with it."""

    setting: str
    peak: int


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run.

    Attributes:
        stages: the fullest rank of each.
        switches: single changes that lower the peak, the least costly first.
    """

    stages: tuple[StageMemory, ...]
    switches: tuple[Switch, ...]

    @property
    def fullest(self) -> StageMemory:
        """The stage of the rank that holds most."""
        return max(self.stages, key=lambda stage: (stage.peak, -stage.stage))


def plan_memory(config: Config, division: Division | None = None) -> MemoryPlan:
    """Return the memory of every stage, and what would lower it.

    Args:
        division: of the optimizer's state, if it is known; else it is made here, which takes
            seconds at a trillion parameters.
    """
    division = division or divide_config(config)
    elements = _elements(config)
    stages = _stages(config, division, elements)
    peak = max(stage.peak for stage in stages)
    found = (
        Switch(setting, max(stage.peak for stage in _stages(changed, division, elements)))
        for setting, changed in switches_of(config)
    )
    return MemoryPlan(stages, tuple(switch for switch in found if switch.peak < peak))


def host_bytes(config: Config) -> list[int]:
    """Return, for each stage, the bytes that each of its ranks has in host memory."""
    chunks, pp = chunks_of(config), config.layout.pp
    return [_activations(config, chunks[stage::pp], stage)[2] for stage in range(pp)]


def switches_of(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield the single changes that may lower a peak, the least costly first, each as the text of
    its setting and the configuration with it.
    """
    train, dep, layout = config.train, config.dep, config.layout
    if set(train.recompute) != set(EVERYTHING):
        name = f"train.recompute=[{', '.join(EVERYTHING)}]"
        yield name, _with(config, "train", recompute=EVERYTHING)
    if not train.fp8_storage and train.dtype != "float64":
        yield "train.fp8_storage=true", _with(config, "train", fp8_storage=True)
    if not train.offload:
        yield "train.offload=true", _with(config, "train", offload=True)
    if not dep.offload_outputs:
        yield "dep.offload_outputs=true", _with(config, "dep", offload_outputs=True)
    if layout.overlap_experts:
        yield "layout.overlap_experts=false", _with(config, "layout", overlap_experts=False)
    limits, half = config.data.limits, dep.max_patches_per_chunk // 2
    if half >= max(limits.image, 4 * limits.frame):  # the largest item still fits
        name = f"dep.max_patches_per_chunk={half}"
        yield name, _with(config, "dep", max_patches_per_chunk=half)
    if train.rows_per_microbatch > 1:
        yield "train.rows_per_microbatch=1", _with(config, "train", rows_per_microbatch=1)


def _with(config: Config, section: str, **values: object) -> Config:
    return config.replace(**{section: getattr(config, section).replace(**values)})


def chunks_of(config: Config) -> list[tuple[range, bool]]:
    """Return, of each of the pp x vpp chunks in the order of the model, its layers and whether it
    has the loss.
    """
    layout, num_layers = config.layout, config.model.language.num_layers
    count = layout.pp * layout.vpp
    if layout.stages is None:
        each = num_layers // count
        sizes = [each] * count
    else:
        sizes = [chunk.count("t") for chunk in expand_stages(layout.stages)]
    ends = [sum(sizes[: n + 1]) for n in range(count)]
    ranges = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [(layers, n == count - 1) for n, layers in enumerate(ranges)]


def microbatches_in_flight(config: Config, stage: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return how many microbatches of each chunk of a stage are held where their sum weighs most.

    Megatron-Core's 1F1B: some forward passes to warm up, then a forward and a backward pass in
    turn; with virtual stages, chunk after chunk in groups of pp microbatches. With overlapped
    experts a pair runs together, behind one more forward pass.

    Args:
        weights: bytes that a microbatch of each chunk leaves.
    """
    layout, total = config.layout, config.num_microbatches() * config.layout.vpp
    behind = layout.pp - stage - 1
    warmup = behind if layout.vpp == 1 else 2 * behind + (layout.vpp - 1) * layout.pp
    warmup = min(total, warmup + layout.overlap_experts)

    def chunk(number: int) -> int:
        return number // layout.pp % layout.vpp

    held, best = [0] * layout.vpp, (0,) * layout.vpp
    for forward in range(total):
        held[chunk(forward)] += 1
        if _weigh(held, weights) > _weigh(best, weights):
            best = tuple(held)
        if forward >= warmup:
            held[layout.vpp - 1 - chunk(forward - warmup)] -= 1
    return best


def _weigh(held: Sequence[int], weights: Sequence[int]) -> int:
    return sum(count * weight for count, weight in zip(held, weights, strict=True))


def _stages(
    config: Config, division: Division, elements: Sequence[tuple[int, int]]
) -> tuple[StageMemory, ...]:
    layout, item = config.layout, ITEMSIZE[config.train.dtype]
    frozen = "language_model" in config.train.frozen
    encoder = [_encoder_elements(config, trained) for trained in (False, True)]
    per_stage = layout.world_size() // layout.pp
    chunks = chunks_of(config)
    found = []
    for stage in range(layout.pp):
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        rank = max(ranks, key=lambda rank: (division.loads[rank].state_bytes, -rank))
        own = chunks[stage :: layout.pp]
        held, activations, host = _activations(config, own, stage)
        own_elements = sum(elements[stage])
        found.append(
            StageMemory(
                stage=stage,
                rank=rank,
                layers=tuple(sorted(layer for layers, _ in own for layer in layers)),
                in_flight=held,
                weights=item * (own_elements + encoder[0]),
                gradients=max(4, item) * (own_elements * (not frozen) + encoder[1]),
                optimizer=division.loads[rank].state_bytes,
                activations=activations,
                host=host,
                embeddings=_embeddings(config, stage),
                passing=_passing(config, own),
                encoder=_encoder(config),
                update=_update(config, division, rank),
            )
        )
    return tuple(found)


def _layers(config: Config, layers: range, has_loss: bool) -> Iterator[list[Kept]]:
    """Yield what is kept of a chunk's microbatch, layer by layer, then for the loss."""
    num_dense = config.model.language.num_dense_layers
    for layer in layers:
        yield list(layer_tensors(config, dense=layer < num_dense))
    if has_loss:
        yield list(head_tensors(config))


def _moves(config: Config, tensor: Kept) -> bool:
    train = config.train
    return train.offload and tensor.moves and tensor.size >= train.offload_min_mib * MIB


def _activations(
    config: Config, chunks: Sequence[tuple[range, bool]], stage: int
) -> tuple[tuple[int, ...], Counter[str], int]:
    """Return microbatches in flight by chunk, bytes on the device by kind, and bytes on the host.

    With `train.offload` four layers are on the device: two on their way out, one in use, one on its
    way back.
    """
    groups = [list(_layers(config, *chunk)) for chunk in chunks]
    held = microbatches_in_flight(
        config, stage, [sum(t.size for group in chunk for t in group) for chunk in groups]
    )
    device: Counter[str] = Counter()
    host, largest = 0, 0
    for count, chunk in zip(held, groups, strict=True):
        for group in chunk:
            moved = 0
            for tensor in group:
                if _moves(config, tensor):
                    moved += tensor.size
                else:
                    device[tensor.kind] += count * tensor.size
            host, largest = host + count * moved, max(largest, moved)
    if config.train.offload:
        device["layers on their way"] = min(host, 4 * largest)
    return held, device, host


def _elements(config: Config) -> list[tuple[int, int]]:
    """Return, for each stage, the numbers in the parameters of a rank, and in the whole tensors
    that it keeps beside its slices under tensor parallelism.
    """
    layout, found = config.layout, []
    for held in _by_stage(config):
        elements = whole = 0
        for name, shape in held:
            size = prod(shape)
            if is_routed_expert(name):
                elements += size // layout.ep
            elif layout.tp > 1 and _is_cut(name):
                elements += size // layout.tp
                whole += size
            else:
                elements += size
        found.append((elements, whole))
    return found


_CUT = ("embed_tokens", "lm_head", "q_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj",
        "up_proj", "down_proj")  # fmt: skip


def _is_cut(name: str) -> bool:
    return name.split(".")[-2] in _CUT


def _by_stage(config: Config) -> list[_Shapes]:
    """Return name and shape of every parameter of the language model, whole, by stage."""
    pp = config.layout.pp
    stage_of = {
        layer: number % pp
        for number, (layers, _) in enumerate(chunks_of(config))
        for layer in layers
    }
    found: list[_Shapes] = [[] for _ in range(pp)]
    for name, shape in language_shapes(config.model.language).items():
        if name.endswith(BIAS):
            continue
        layer = name.removeprefix(f"{LANGUAGE}model.layers.").partition(".")[0]
        if layer.isdecimal():
            stage = stage_of[int(layer)]
        else:
            stage = 0 if "embed_tokens" in name else pp - 1
        found[stage].append((name, shape))
    return found


def _encoder_shapes(config: Config, trained: bool) -> _Shapes:
    prefixes = {"vision_tower": "vision_tower.", "projector": "mm_projector."}
    frozen = config.train.frozen if trained else []
    without = tuple(prefix for part, prefix in prefixes.items() if part in frozen)
    shapes = released_shapes(config.model.vision)
    return [(name, shape) for name, shape in shapes.items() if not name.startswith(without)]


def _encoder_elements(config: Config, trained: bool) -> int:
    return sum(prod(shape) for _, shape in _encoder_shapes(config, trained))


def divide_config(config: Config) -> Division:
    """Divide the optimizer's work as the run itself would; no model is built."""
    layout, item = config.layout, ITEMSIZE[config.train.dtype]
    per_stage = layout.world_size() // layout.pp
    encoder = tuple(
        TensorSize(name, shape, item) for name, shape in _encoder_shapes(config, trained=True)
    )
    groups = [PlannedGroup("encoder", tuple(range(layout.world_size())), encoder)]
    first_slice = config.model.language.num_experts // layout.ep
    for stage, parameters in enumerate(_by_stage(config)):
        held: dict[str, list[TensorSize]] = {"dense": [], "expert": []}
        for name, shape in parameters if "language_model" not in config.train.frozen else ():
            if not is_routed_expert(name) or _expert(name) < first_slice:
                held[replicas_of(name)].append(TensorSize(name, shape, item))
        groups += stage_groups(stage, per_stage, layout.ep, held)
    return divide(groups, layout.world_size(), ModelShape.of(config.model), config.optim)


def _expert(name: str) -> int:
    return int(name.partition(".experts.")[2].partition(".")[0])


def _embeddings(config: Config, stage: int) -> int:
    """Return the bytes of vision embeddings and their gradients that wait on a rank."""
    ratio = config.data.vision_token_ratio or 0.0
    layout, item = config.layout, ITEMSIZE[config.train.dtype]
    width = config.model.language.hidden_size * item
    tokens = int(ratio * config.tokens_per_step())
    encoded = -(-tokens // layout.world_size())  # by itself, until they are sent; then gradients
    if stage > 0 or config.dep.offload_outputs:
        return encoded * width
    return (-(-tokens // (layout.dp * layout.cp * layout.tp)) * 2 + encoded) * width


def _passing(config: Config, chunks: Sequence[tuple[range, bool]]) -> int:
    """Return the most that one layer, or the loss, makes and drops."""
    language, tokens = config.model.language, Tokens.of(config)
    item = ITEMSIZE[config.train.dtype]
    without = _with(config, "train", recompute=[], fp8_storage=False)
    most = 0
    for layers, has_loss in chunks:
        for dense in {layer < language.num_dense_layers for layer in layers}:
            plain, kept = (
                sum(tensor.size for tensor in layer_tensors(some, dense))
                for some in (without, config)
            )
            remade = plain - kept
            # Sent and received tokens, in two orders each, forward and backward.
            sent = 0 if dense else 4 * tokens.part * language.experts_per_token
            most = max(most, remade + sent * language.hidden_size * item)
        if has_loss:  # logits in the model's type, and their gradient in both types
            logits = tokens.cp * language.vocab_size // config.layout.tp
            most = max(most, logits * (2 * item + max(4, item)))
    return most


def _encoder(config: Config) -> int:
    dep, item = config.dep, ITEMSIZE[config.train.dtype]
    half = -(-dep.max_patches_per_chunk // 2)
    chunk = int(activation_bytes([(1, 2, half)], config.model.vision, item)[0])
    if dep.memory_limit_gib is not None:
        chunk = min(chunk, int(dep.memory_limit_gib * GIB))
    return chunk + 2 * dep.exchange_budget_mib * MIB


def _update(config: Config, division: Division, rank: int) -> int:
    """Return the bytes of two rounds of buckets that a rank sends and receives."""
    most, item = 0, ITEMSIZE[config.train.dtype]
    for group in division.groups:
        if rank in group.ranks and len(group.ranks) > 1 and config.optim.shard_state:
            bucket = 2 * len(group.ranks) * config.optim.bucket_elements
            most = max(most, min(bucket, sum(tensor.elements for tensor in group.tensors)))
    return most * item
