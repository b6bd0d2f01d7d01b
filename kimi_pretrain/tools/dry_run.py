"""Builds one rank of each pipeline stage on the meta device and counts parameters and memory.

Needs no GPU, no memory and no data: a fake process group represents the whole job. The checks of
Megatron-Core apply here, too. The optimizer's work is divided among all ranks of the job by the
rule that the job itself uses (`optim.owners`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from kimi_pretrain.config import Config
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.engine.model_builder import DTYPES, build_chunks, engine_config
from kimi_pretrain.engine.param_names import View, layers_of, views
from kimi_pretrain.optim.groups import ModelShape, replicas_of
from kimi_pretrain.optim.owners import TensorSize
from kimi_pretrain.tools import memory_report
from kimi_pretrain.tools.optimizer_division import Division, PlannedGroup, divide, stage_groups
from kimi_pretrain.tools.optimizer_report import (
    OptimizerSummary,
    assignments,
    runs,
    summarise,
    summary_as_json,
    summary_lines,
    tab_separated,
)
from kimi_pretrain.weights.siglip_shapes import siglip_shapes
from moonvit3d.model import VisionEncoder


@dataclass(frozen=True)
class StageCount:
    """Parameters of one pipeline stage.

    Attributes:
        layers: decoder layers of the stage, global numbers from 0.
        per_rank: parameters that one rank of the stage computes with (its share of the experts and,
            under tensor parallelism, of the widths).
        total: parameters of the stage, including all experts.
        activated: parameters that one token passes through.
        routing_biases: entries of the aux-loss-free biases, which are not parameters.
    """

    stage: int
    layers: tuple[int, ...]
    per_rank: int
    total: int
    activated: int
    routing_biases: int


@dataclass(frozen=True)
class DryRun:
    """Counts of a configuration.

    Attributes:
        optimizer: summary of the optimizer's division among ranks.
        division: the same division, tensor by tensor.
        memory: planned memory of the ranks, and settings that bring it under a limit.
    """

    stages: tuple[StageCount, ...]
    language_model: int
    language_model_activated: int
    routing_biases: int
    vision_tower: int
    projector: int
    siglip: int
    optimizer: OptimizerSummary
    division: Division
    memory: memory_report.MemoryReport


def dry_run(config: Config) -> DryRun:
    """Build every stage on the meta device and return the counts.

    Raises:
        ValueError: a process group is already initialised in this process, or no optimizer rule
            covers a parameter.
    """
    if dist.is_initialized():
        raise ValueError("a dry run needs a process of its own: a process group is initialised")
    built = [_build_stage(config, stage) for stage in range(config.layout.pp)]
    stages = tuple(count for count, _ in built)
    with torch.device("meta"):
        encoder = VisionEncoder(config.model.vision)
    groups = [_encoder_group(config, encoder), *(group for _, some in built for group in some)]
    world_size = config.layout.world_size()
    division = divide(groups, world_size, ModelShape.of(config.model), config.optim)
    return DryRun(
        stages=stages,
        language_model=sum(stage.total for stage in stages),
        language_model_activated=sum(stage.activated for stage in stages),
        routing_biases=sum(stage.routing_biases for stage in stages),
        vision_tower=_count(encoder.vision_tower),
        projector=_count(encoder.mm_projector),
        siglip=sum(map(math.prod, _siglip_shapes(config).values())),
        optimizer=summarise(division, [stage.layers for stage in stages]),
        division=division,
        memory=memory_report.report(config, division),
    )


def lines(result: DryRun) -> Iterator[str]:
    """Yield the result as text, for the terminal."""
    yield "stage  layers        parameters on a rank      of the stage         activated"
    for stage in result.stages:
        yield (
            f"{stage.stage:5d}  {runs(stage.layers):12s} {stage.per_rank:20,d} {stage.total:17,d} "
            f"{stage.activated:17,d}"
        )
    yield f"language model    {result.language_model:,} parameters"
    yield f"  activated       {result.language_model_activated:,}"
    yield f"  routing biases  {result.routing_biases:,} entries (not parameters)"
    yield f"vision tower      {result.vision_tower:,}"
    yield f"projector         {result.projector:,}"
    if result.siglip:
        yield f"train.siglip      {result.siglip:,}"
    yield from memory_report.lines(result.memory)
    yield from summary_lines(result.optimizer)


def table_lines(result: DryRun) -> Iterator[str]:
    """Yield the optimizer's assignment of every tensor as tab-separated lines."""
    yield from tab_separated(assignments(result.division))


def as_json(result: DryRun) -> dict[str, Any]:
    """Return the result as plain values, without the list of tensors."""
    plain = {name: value for name, value in vars(result).items() if name != "division"}
    return plain | {
        "stages": [asdict(stage) for stage in result.stages],
        "optimizer": summary_as_json(result.optimizer),
        "memory": memory_report.as_json(result.memory),
    }


def _build_stage(config: Config, stage: int) -> tuple[StageCount, list[PlannedGroup]]:
    """Build the first rank of a stage; return its counts and the tensor groups of the stage."""
    layout = config.layout
    per_stage = layout.world_size() // layout.pp
    dist.init_process_group(
        "fake", store=FakeStore(), rank=stage * per_stage, world_size=layout.world_size()
    )
    try:
        mesh = engine_mesh.build(layout, torch.device("cpu"))
        with torch.device("meta"):
            # The run's own attention may need a device or a package that this machine lacks.
            chunks = build_chunks(config, engine_config(config, "portable"), "portable")
        held = [
            view
            for chunk in chunks
            for view in views(chunk, first_expert=0, buffers=True, num_tp=layout.tp)
        ]
        layers = sorted(layer for chunk in chunks for layer in layers_of(chunk))
        groups = _groups_of_stage(config, stage, held)
        _check_places(groups, mesh)
        return _count_stage(config, stage, layers, held), groups
    finally:
        engine_mesh.stop()


def _count_stage(
    config: Config, stage: int, layers: Sequence[int], held: Sequence[View]
) -> StageCount:
    language, ep = config.model.language, config.layout.ep
    dense = routed = biases = per_rank = 0
    for view in held:
        size = math.prod(view.whole_shape)
        if _is_routing_bias(view):
            biases += size
            continue
        per_rank += view.data.numel()
        if replicas_of(view.name) == "expert":
            routed += size
        else:
            dense += size
    per_token = routed * ep * language.experts_per_token // language.num_experts
    return StageCount(
        stage=stage,
        layers=tuple(layers),
        per_rank=per_rank,
        total=dense + routed * ep,
        activated=dense + per_token,
        routing_biases=biases,
    )


def _groups_of_stage(config: Config, stage: int, held: Sequence[View]) -> list[PlannedGroup]:
    """Return the replica groups of a stage, as `model.trained_tensors` forms them on each rank."""
    layout = config.layout
    tensors: dict[str, list[TensorSize]] = {"dense": [], "expert": []}
    for view in held:
        if not _is_routing_bias(view) and "language_model" not in config.train.frozen:
            size = TensorSize(view.name, view.whole_shape, view.data.dtype.itemsize)
            tensors[replicas_of(view.name)].append(size)
    per_stage = layout.world_size() // layout.pp
    return list(stage_groups(stage, per_stage, layout.ep, tensors))


def _encoder_group(config: Config, encoder: VisionEncoder) -> PlannedGroup:
    """Return the trained tensors of the encoder, which all ranks hold."""
    frozen = {"vision_tower": "vision_tower.", "projector": "mm_projector."}
    prefixes = tuple(prefix for part, prefix in frozen.items() if part in config.train.frozen)
    itemsize = DTYPES[config.train.dtype].itemsize
    shapes = {name: tuple(param.shape) for name, param in encoder.named_parameters()}
    shapes |= _siglip_shapes(config)
    trained = [
        TensorSize(name, shape, itemsize)
        for name, shape in shapes.items()
        if not name.startswith(prefixes)
    ]
    return PlannedGroup("encoder", tuple(range(config.layout.world_size())), tuple(trained))


def _siglip_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return siglip_shapes(config.train.siglip, config.model.vision.width)


def _check_places(groups: Sequence[PlannedGroup], mesh: engine_mesh.Mesh) -> None:
    """Assert that the groups of this rank match Megatron-Core's, in the same rank order."""
    for group in groups:
        if mesh.rank in group.ranks:
            found = tuple(dist.get_process_group_ranks(mesh.groups[group.replicas]))
            assert found == group.ranks, (group.replicas, found, group.ranks)


def _is_routing_bias(view: View) -> bool:
    return view.name.endswith("e_score_correction_bias")


def _count(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
