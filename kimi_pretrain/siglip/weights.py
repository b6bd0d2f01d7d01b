"""SigLIP's pooling head, text tower, scale and bias from its checkpoint.

The tower itself is `train.vision_weights`' (`moonvit3d.layouts`); what that skips is here.
"""

import torch

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.siglip.heads import HeadSizes, SiglipHeads
from kimi_pretrain.weights.weight_reader import WeightReader, and_more, open_weights

PREFIXES = ("vision_model.head.", "text_model.", "logit_scale", "logit_bias")
# What leaves no trace in shapes: key of config.json -> what transformers takes where it is absent.
_DEFAULTS = {"num_attention_heads": 12, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
_BUFFERS = ("text_model.embeddings.position_ids",)  # saved by early versions of transformers


def load_heads(heads: SiglipHeads, uri: str) -> None:
    """Fill both heads, scale and bias in place; everything is checked before anything changes.

    Args:
        uri: a .safetensors file or a folder that `SiglipModel.save_pretrained` wrote
            (google/siglip-so400m-patch14-384); a path or s3://bucket/prefix. A file alone does not
            say how many heads it has: give the folder, whose config.json is compared.

    Raises:
        FileNotFoundError: nothing there.
        CheckpointError: a tensor is missing, unexpected, of another shape, or not finite; or its
            config.json states other heads, norms or activations.
    """
    reader = open_weights(uri, lambda name: name.startswith(PREFIXES))
    wanted = dict(heads.named_parameters())
    found = {n for n in reader.headers if n.startswith(PREFIXES)} - set(_BUFFERS)
    for names, what in ((wanted.keys() - found, "no"), (found - wanted.keys(), "unexpected")):
        if names:
            raise CheckpointError(
                f"{reader.where}: {what} tensor {min(names)}{and_more(len(names) - 1)}: want a "
                f"SigLIP model whose text tower has {heads.sizes.depth} blocks"
            )
    for name, parameter in wanted.items():
        shape = reader.headers[name].shape
        if shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{reader.place(name)} has shape {list(shape)}: want {list(parameter.shape)}"
            )
    _check_config(reader, heads.sizes)
    values = {name: reader.read(name) for name in wanted}
    for name, value in values.items():
        if not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{reader.place(name)} has numbers that are not finite")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(values[name])


def _check_config(reader: WeightReader, sizes: HeadSizes) -> None:
    own = (sizes.heads, sizes.norm_eps, "gelu_pytorch_tanh")
    for tower in ("text_config", "vision_config") if reader.config is not None else ():
        stated = (reader.config or {}).get(tower) or {}
        for (key, default), ours in zip(_DEFAULTS.items(), own, strict=True):
            if (found := stated.get(key, default)) != ours:
                raise CheckpointError(
                    f"{reader.where}/config.json: {tower}.{key} is {found!r}, want {ours!r}"
                )
