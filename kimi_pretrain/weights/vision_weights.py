"""Matches the initial weights of a fresh run's encoder (`train.vision_weights`) by headers.

The source is a file or folder in any layout that `moonvit3d.layouts` knows (Kimi K2.5, SigLIP,
transformers), or a checkpoint of this project, on disk or in an object store. In a whole model only
the files that hold the encoder are read. One part of the encoder can be loaded without the other: a
stage with another language model needs a projector of another width and loads only the tower.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.reliability.run_history import latest_in
from kimi_pretrain.weights.hf_config import vision_differences
from kimi_pretrain.weights.matching import OPTIMIZER, Weights
from kimi_pretrain.weights.shapes import SIGLIP, VISION
from kimi_pretrain.weights.weight_reader import WeightReader, open_weights
from moonvit3d.config import MoonViTConfig
from moonvit3d.files import CONSTANTS
from moonvit3d.layouts import LAYOUTS, NameScheme, Part, TensorHeader, assemble, plan

_PARTS: dict[str, Part] = {"tower": "vision_tower", "projector": "mm_projector"}
_TOWER, _PROJECTOR = VISION
# Prefixes in whole models, SigLIP models and checkpoints that do not belong to an encoder.
_SKIPPED = (OPTIMIZER, SIGLIP, *sorted({prefix for layout in LAYOUTS for prefix in layout.skipped}))


@dataclass(frozen=True)
class VisionWeights(Weights):
    """Stored tensors matched with an encoder's parameters; q, k and v may be separate tensors."""

    layout: NameScheme
    config: MoonViTConfig

    def _made(self, name: str, sources: tuple[str, ...]) -> Tensor:
        pieces = [super(VisionWeights, self)._made(name, (source,)) for source in sources]
        return assemble(self.layout, name, pieces, self.config)


def open_vision_weights(
    uri: str, part: Literal["tower", "projector", "both"] | None, config: MoonViTConfig
) -> VisionWeights:
    """Match weights with an encoder; only headers are read.

    Args:
        uri: a .safetensors file, a Hugging Face folder, a checkpoint or a run's folder (its newest
            checkpoint); a path or s3://bucket/prefix.
        part: part to load; None loads both, or only the tower from SigLIP, which has no projector.

    Raises:
        FileNotFoundError: there is nothing at the URI.
        CheckpointError: as `match_vision`.
    """
    where = latest_in(uri)
    reader = open_weights(where, lambda name: not name.startswith(_SKIPPED))
    return match_vision(reader, where, part, config)


def match_vision(
    reader: WeightReader,
    where: str,
    part: Literal["tower", "projector", "both"] | None,
    config: MoonViTConfig,
) -> VisionWeights:
    """Match weights with an encoder by their headers; `where` is the location, for messages.

    Raises:
        CheckpointError: a part is missing; a tensor is missing, unexpected, or of another shape or
            dtype; or the heads, `norm_eps` or `rope_theta` differ.
    """
    headers = {
        name: TensorHeader(header.shape, header.dtype)
        for name, header in reader.headers.items()
        if not name.startswith(_SKIPPED)
    }
    try:
        layout, sources = plan(headers, config, None if part is None else _PARTS.get(part))
        _check_parts(part, layout, sources)
    except ValueError as error:
        hint = _hint(part, headers, str(error))
        raise CheckpointError(f"{where}: {error}{hint}") from None
    _check_constants(reader, where, config)
    return VisionWeights(reader, sources, (), layout, config)


def _check_parts(part: str | None, layout: NameScheme, sources: Mapping[str, object]) -> None:
    if part == "both" and not any(name.startswith(_PROJECTOR) for name in sources):
        raise ValueError(f"no projector in layout {layout.name}")


def _hint(part: str | None, headers: Mapping[str, object], error: str) -> str:
    """Suggest loading only the tower if that may be the intention."""
    of_projector = "projector" in error.partition(":")[0] or _PROJECTOR in error
    tower = any(_TOWER in name or "vision_model." in name for name in headers)
    if part in (None, "both") and of_projector and tower:
        return "; train.vision_part=tower takes the tower alone"
    return ""


def _check_constants(reader: WeightReader, where: str, config: MoonViTConfig) -> None:
    """Compare settings that do not show in shapes: heads, norm_eps, rope_theta."""
    stated = dict(reader.stated)
    if reader.manifest is not None:
        stated = reader.manifest.model.get("vision", {})
    for name in ("heads", *CONSTANTS):
        here = getattr(config, name)
        if stated.get(name, here) != here:
            raise CheckpointError(
                f"{where} was written with {name} = {stated[name]!r}, "
                f"model.vision.{name} is {here!r}"
            )
    if reader.config is not None and (found := vision_differences(reader.config, config)):
        raise CheckpointError(f"{where}/config.json: {found[0]}")
