"""Builds a configuration on the meta device, one rank of each pipeline stage, and counts.

Needs no GPU, no memory and no data: a fake process group stands for the whole job. What Megatron-
Core would refuse, it refuses here too.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from kimi_pretrain.config import Config, LayoutConfig
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.engine.names import layers_of, views
from kimi_pretrain.engine.spec import build_chunks, engine_config
from moonvit3d.model import VisionEncoder


@dataclass(frozen=True)
class StageCount:
    """Parameters of one pipeline stage.

    Attributes:
        layers: decoder layers of the stage, global numbers from 0.
        per_rank: parameters that one rank of the stage computes with (its share of the experts and,
            under tensor parallelism, of the widths).
        total: parameters of the stage, all experts counted.
        activated: parameters that one token passes through.
        routing_biases: entries of the aux-loss-free biases; they are no parameters.
    """

    stage: int
    layers: tuple[int, ...]
    per_rank: int
    total: int
    activated: int
    routing_biases: int


@dataclass(frozen=True)
class DryRun:
    """What a configuration amounts to."""

    stages: tuple[StageCount, ...]
    language_model: int
    language_model_activated: int
    routing_biases: int
    vision_tower: int
    projector: int


def dry_run(config: Config) -> DryRun:
    """Build every stage on the meta device and return the counts.

    Raises:
        ValueError: a process group is already initialised in this process.
    """
    if dist.is_initialized():
        raise ValueError("a dry run needs a process of its own: a process group is initialised")
    stages = tuple(_count_stage(config, stage) for stage in range(config.layout.pp))
    with torch.device("meta"):
        encoder = VisionEncoder(config.model.vision)
    return DryRun(
        stages=stages,
        language_model=sum(stage.total for stage in stages),
        language_model_activated=sum(stage.activated for stage in stages),
        routing_biases=sum(stage.routing_biases for stage in stages),
        vision_tower=_count(encoder.vision_tower),
        projector=_count(encoder.mm_projector),
    )


def lines(result: DryRun) -> Iterator[str]:
    """Yield the result as text, for the terminal."""
    yield "stage  layers        parameters on a rank      of the stage         activated"
    for stage in result.stages:
        yield (
            f"{stage.stage:5d}  {_runs(stage.layers):12s} {stage.per_rank:20,d} {stage.total:17,d} "
            f"{stage.activated:17,d}"
        )
    yield f"language model    {result.language_model:,} parameters"
    yield f"  activated       {result.language_model_activated:,}"
    yield f"  routing biases  {result.routing_biases:,} entries (not parameters)"
    yield f"vision tower      {result.vision_tower:,}"
    yield f"projector         {result.projector:,}"


def _runs(layers: tuple[int, ...]) -> str:
    """Return "0-1,32-33" for layers 0, 1, 32 and 33."""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends)) or "none"


def as_json(result: DryRun) -> dict[str, Any]:
    """Return the result as plain values."""
    return asdict(result)


def _count_stage(config: Config, stage: int) -> StageCount:
    layout: LayoutConfig = config.layout
    dist.init_process_group(
        "fake",
        store=FakeStore(),
        rank=stage * layout.world_size() // layout.pp,
        world_size=layout.world_size(),
    )
    try:
        engine_mesh.build(layout, torch.device("cpu"))
        return _build_and_count(config, stage)
    finally:
        engine_mesh.stop()


def _build_and_count(config: Config, stage: int) -> StageCount:
    language, ep = config.model.language, config.layout.ep
    with torch.device("meta"):
        chunks = build_chunks(config, engine_config(config))
    dense = routed = biases = held = 0
    for chunk in chunks:
        for view in views(chunk, first_expert=0, buffers=True, num_tp=config.layout.tp):
            size = math.prod(view.whole_shape)
            if not view.name.endswith("e_score_correction_bias"):
                held += view.data.numel()
            if view.name.endswith("e_score_correction_bias"):
                biases += size
            elif ".mlp.experts." in view.name:
                routed += size
            else:
                dense += size
    per_token = routed * ep * language.experts_per_token // language.num_experts
    layers = sorted(layer for chunk in chunks for layer in layers_of(chunk))
    return StageCount(
        stage=stage,
        layers=tuple(layers),
        per_rank=held,
        total=dense + routed * ep,
        activated=dense + per_token,
        routing_biases=biases,
    )


def _count(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
