"""Lists the name and shape of every tensor of `train.siglip`. Pure: no module is built."""

from kimi_pretrain.siglip.config import SiglipConfig
from kimi_pretrain.weights.shapes import SIGLIP, Shapes


def siglip_shapes(config: SiglipConfig | None, width: int) -> Shapes:
    """Return name -> shape of every tensor of `train.siglip`, unordered; empty if it is off.

    Args:
        width: `model.vision.width`.
    """
    if config is None:
        return {}
    found: Shapes = {"logit_scale": (1,), "logit_bias": (1,)}

    def linear(name: str, out: int, of: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (out, of), (out,)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (width,)

    def mlp(name: str) -> None:
        linear(f"{name}.fc1", config.mlp_width, width)
        linear(f"{name}.fc2", width, config.mlp_width)

    head, text = "vision_model.head", "text_model"
    found[f"{head}.probe"] = (1, 1, width)
    found[f"{head}.attention.in_proj_weight"] = (3 * width, width)
    found[f"{head}.attention.in_proj_bias"] = (3 * width,)
    linear(f"{head}.attention.out_proj", width, width)
    norm(f"{head}.layernorm")
    mlp(f"{head}.mlp")
    found[f"{text}.embeddings.token_embedding.weight"] = (config.vocabulary, width)
    found[f"{text}.embeddings.position_embedding.weight"] = (config.positions, width)
    for layer in (f"{text}.encoder.layers.{number}" for number in range(config.depth)):
        norm(f"{layer}.layer_norm1")
        norm(f"{layer}.layer_norm2")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(f"{layer}.self_attn.{name}", width, width)
        mlp(f"{layer}.mlp")
    norm(f"{text}.final_layer_norm")
    linear(f"{text}.head", width, width)
    return {SIGLIP + name: shape for name, shape in found.items()}
