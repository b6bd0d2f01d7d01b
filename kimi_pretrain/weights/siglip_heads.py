"""Matches SigLIP's pooling head, text tower, scale and bias (`train.siglip.weights`) by headers.

The vision tower comes from `train.vision_weights` (`moonvit3d.layouts`), which skips these tensors.
Names are those of SigLIP's checkpoint; in a run's checkpoint they have the prefix `siglip.`.
"""

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.reliability.run_history import latest_in
from kimi_pretrain.siglip.config import SiglipConfig
from kimi_pretrain.weights.matching import FLOATS, Weights
from kimi_pretrain.weights.shapes import SIGLIP
from kimi_pretrain.weights.siglip_shapes import siglip_shapes
from kimi_pretrain.weights.weight_reader import WeightReader, and_more, open_weights

NORM_EPS = 1e-6
_PREFIXES = ("vision_model.head.", "text_model.", "logit_scale", "logit_bias")
# Settings that do not show in shapes: key of config.json -> default of transformers.
_DEFAULTS = {"num_attention_heads": 12, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
_BUFFERS = ("text_model.embeddings.position_ids",)  # saved by early versions of transformers


def open_heads(uri: str, config: SiglipConfig, width: int) -> Weights:
    """Match stored heads with those of a config; only headers are read.

    Args:
        uri: a .safetensors file or a folder that `SiglipModel.save_pretrained` wrote
            (google/siglip-so400m-patch14-384), a checkpoint of this project or a run's folder; a
            path or s3://bucket/prefix. A single file does not state its number of heads: give the
            folder, so that its config.json is compared.

    Raises:
        FileNotFoundError: there is nothing at the URI.
        CheckpointError: as `match_heads`.
    """
    beginnings = (SIGLIP, *_PREFIXES)
    reader = open_weights(latest_in(uri), lambda name: name.startswith(beginnings))
    return match_heads(reader, config, width)


def match_heads(reader: WeightReader, config: SiglipConfig, width: int) -> Weights:
    """Match stored heads with those of a config by their headers.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape or dtype; or the
            config.json next to it states other heads, norms or activations.
    """
    own = any(name.startswith(SIGLIP) for name in reader.headers)
    shapes = siglip_shapes(config, width)
    stored = {name: name if own else name.removeprefix(SIGLIP) for name in shapes}
    wanted = {stored[name]: shape for name, shape in shapes.items()}
    found = {n for n in reader.headers if n.startswith(SIGLIP if own else _PREFIXES)}
    found -= set(_BUFFERS)
    for names, what in ((wanted.keys() - found, "no"), (found - wanted.keys(), "unexpected")):
        if names:
            raise CheckpointError(
                f"{reader.where}: {what} tensor {min(names)}{and_more(len(names) - 1)}: want a "
                f"SigLIP model whose text tower has {config.depth} blocks"
            )
    for name, shape in wanted.items():
        header = reader.headers[name]
        if header.shape != shape:
            raise CheckpointError(
                f"{reader.place(name)} has shape {list(header.shape)}: want {list(shape)}"
            )
        if header.dtype not in FLOATS:
            raise CheckpointError(f"{reader.place(name)} is {header.dtype}: want floats")
    _check_config(reader, config)
    return Weights(reader, {name: (stored[name],) for name in shapes}, ())


def _check_config(reader: WeightReader, config: SiglipConfig) -> None:
    if reader.manifest is not None:
        there = ((reader.manifest.training or {}).get("siglip") or {}).get("heads", config.heads)
        if there != config.heads:
            raise CheckpointError(
                f"{reader.where}: train.siglip.heads was {there}, here it is {config.heads}"
            )
    own = (config.heads, NORM_EPS, "gelu_pytorch_tanh")
    for tower in ("text_config", "vision_config") if reader.config is not None else ():
        stated = (reader.config or {}).get(tower) or {}
        for (key, default), ours in zip(_DEFAULTS.items(), own, strict=True):
            if (found := stated.get(key, default)) != ours:
                raise CheckpointError(
                    f"{reader.where}/config.json: {tower}.{key} is {found!r}, want {ours!r}"
                )
