"""What the last checkpoint of a run will hold, before it is written: names, shapes and types.

A later stage of training is checked against it as against one that is there
(`initial_weights.check_initial_weights`), so that a chain of stages is refused before its first one
starts, and not when weeks of training are over. Pure: follows from the configuration alone.
"""

from typing import TYPE_CHECKING

import torch

from kimi_pretrain.checkpoint.load import OPTIMIZER_STEPS
from kimi_pretrain.checkpoint.manifest import RunState, manifest_of
from kimi_pretrain.weights.kept_optimizer import optimizer_state
from kimi_pretrain.weights.shapes import BIAS, model_shapes
from kimi_pretrain.weights.siglip_shapes import siglip_shapes
from kimi_pretrain.weights.weight_reader import TensorHeader, WeightReader

if TYPE_CHECKING:
    from kimi_pretrain.config import Config


def planned_weights(config: "Config", where: str) -> WeightReader:
    """Return the headers of the checkpoint that a run of this configuration ends with.

    Its tensors cannot be read. Where `data.budget` ends the run, its last step follows from the
    data, and is given as 0 here.

    Args:
        where: the run's folder, for messages.
    """
    own = getattr(torch, config.train.dtype)
    heads = siglip_shapes(config.train.siglip, config.model.vision.width)
    tensors = {
        name: (torch.float32 if name.endswith(BIAS) else own, shape)
        for name, shape in (model_shapes(config.model) | heads).items()
    }
    tensors |= {**dict(optimizer_state(config)), OPTIMIZER_STEPS: (torch.int64, ())}
    headers = {
        name: TensorHeader(shape, dtype, "", 0) for name, (dtype, shape) in sorted(tensors.items())
    }
    steps = config.train.steps if config.data.budget is None else 0
    manifest = manifest_of(config, RunState(steps, steps), {}, {})
    return WeightReader(where, headers, manifest=manifest)
