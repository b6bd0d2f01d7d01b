"""From the configuration to the sizes by which the optimizer cuts fused matrices. Pure."""

from kimi_pretrain.config import Config
from kimi_pretrain.optim.groups import ModelShape


def model_shape(config: Config) -> ModelShape:
    """Return the sizes by which the optimizer cuts fused matrices."""
    language = config.model.language
    return ModelShape(
        num_heads=language.num_heads,
        qk_nope_dim=language.qk_nope_dim,
        qk_rope_dim=language.qk_rope_dim,
        v_dim=language.v_dim,
        kv_lora_rank=language.kv_lora_rank,
        vision_heads=config.model.vision.heads,
    )
