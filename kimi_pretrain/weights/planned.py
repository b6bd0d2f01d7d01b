"""Predicts the names, shapes and dtypes in the last checkpoint of a run before it is written.

A later training stage is checked against this prediction as against an existing checkpoint
(`initial_weights.check_initial_weights`). A chain of stages is thus refused before its first stage
starts, rather than after weeks of training. Pure: depends only on the config.
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
    """Return the headers of the final checkpoint of a run with this config.

    Its tensors cannot be read. If `data.budget` ends the run, the last step depends on the data and
    is given as 0 here.

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
