"""The `model` section: sizes of the vision encoder and of the language model."""

from typing import Self

from pydantic import Field, model_validator

from moonvit3d.config import MoonViTConfig
from typed_config.section import Section


class YarnConfig(Section):
    """YaRN scaling of the rotary embedding (arXiv:2309.00071)."""

    factor: float
    """Factor by which the original context length is stretched.
    [-; kimi_pretrain/engine/model_builder.py]"""
    original_max_position: int = 4096
    """Context length of training before YaRN.
    [tokens; kimi_pretrain/engine/model_builder.py]"""
    beta_fast: float = 32.0
    """Frequencies with at least this many rotations over the original length are unchanged.
    [rotations; kimi_pretrain/engine/model_builder.py]"""
    beta_slow: float = 1.0
    """Frequencies with at most this many rotations are fully interpolated.
    [rotations; kimi_pretrain/engine/model_builder.py]"""
    mscale: float = 1.0
    """Coefficient of the attention temperature that is applied to the rotary embedding.
    [-; kimi_pretrain/engine/model_builder.py]"""
    mscale_all_dim: float = 1.0
    """Coefficient of the attention temperature that is applied to the logits.
    [-; kimi_pretrain/engine/model_builder.py]"""


class LanguageConfig(Section):
    """The MLA + mixture-of-experts language model (Kimi K2 report, table 2; DeepSeek-V3 layout)."""

    num_layers: int = Field(gt=0)
    """Decoder layers, including dense layers. [layers; kimi_pretrain/engine/model_builder.py]"""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream. [channels; kimi_pretrain/engine/model_builder.py]"""
    num_heads: int = Field(gt=0)
    """Attention heads; a multiple of layout.tp. [heads; kimi_pretrain/engine/model_builder.py]"""
    dense_ffn_size: int = Field(gt=0)
    """Hidden width of the MLP in a dense layer.
    [channels; kimi_pretrain/engine/model_builder.py]"""
    expert_ffn_size: int = Field(gt=0)
    """Hidden width of one expert. [channels; kimi_pretrain/engine/model_builder.py]"""
    q_lora_rank: int | None
    """Rank of the queries' low-rank projection; null projects directly.
    [channels; kimi_pretrain/engine/latent_attention.py]"""
    kv_lora_rank: int = Field(gt=0)
    """Rank of the latent from which keys and values are computed.
    [channels; kimi_pretrain/engine/latent_attention.py]"""
    qk_nope_dim: int = Field(gt=0)
    """Channels per head of queries and keys that carry no position.
    [channels; kimi_pretrain/engine/model_builder.py]"""
    qk_rope_dim: int = Field(gt=0)
    """Rotary channels per head of the queries, and of the keys, which all heads share.
    [channels; kimi_pretrain/engine/model_builder.py]"""
    v_dim: int = Field(gt=0)
    """Channels per head of the values. [channels; kimi_pretrain/engine/model_builder.py]"""
    num_experts: int = Field(gt=0)
    """Routed experts per layer; a multiple of layout.ep.
    [experts; kimi_pretrain/engine/model_builder.py]"""
    experts_per_token: int = Field(gt=0)
    """Routed experts per token (top-k). [experts; kimi_pretrain/engine/model_builder.py]"""
    num_shared_experts: int = Field(gt=0)
    """Experts that process every token. [experts; kimi_pretrain/engine/model_builder.py]"""
    num_dense_layers: int = Field(default=1, ge=0)
    """Number of leading layers with a dense MLP instead of experts.
    [layers; kimi_pretrain/engine/model_builder.py]"""
    routed_scaling_factor: float
    """Factor on the sum of the routed experts' outputs.
    [-; kimi_pretrain/engine/model_builder.py]"""
    aux_loss_coeff: float = 1e-3
    """Weight of the routers' sequence-wise balance loss.
    [-; kimi_pretrain/engine/model_builder.py]"""
    expert_bias_update_rate: float = 1e-3
    """Change of a routing bias per step (auxiliary-loss-free balancing).
    [-; kimi_pretrain/engine/model_builder.py]"""
    vocab_size: int = Field(gt=0)
    """Rows of embedding and output head; at least the tokenizer's size, a multiple of layout.tp.
    [ids; kimi_pretrain/engine/model_builder.py]"""
    rope_theta: float = 50_000.0
    """Base of the rotary frequencies. [-; kimi_pretrain/engine/model_builder.py]"""
    yarn: YarnConfig | None = None
    """Scaling to a longer context; null: none. [-; kimi_pretrain/engine/model_builder.py]"""
    norm_eps: float = 1e-5
    """Epsilon of every RMSNorm. [-; kimi_pretrain/engine/model_builder.py]"""
    init_std: float = 0.02
    """Standard deviation of the weights at initialisation.
    [-; kimi_pretrain/engine/model_builder.py]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than "
                f"num_experts={self.num_experts}"
            )
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers={self.num_dense_layers} is more than "
                f"num_layers={self.num_layers}"
            )
        return self


class ModelConfig(Section):
    """The vision encoder (tower and projector) and the language model."""

    vision: MoonViTConfig
    """MoonViT-3D and its projector. [-; kimi_pretrain/model.py]"""
    language: LanguageConfig
    """The language model. [-; kimi_pretrain/engine/model_builder.py]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.vision.out_width != self.language.hidden_size:
            raise ValueError(
                f"model.vision.out_width={self.vision.out_width} must equal "
                f"model.language.hidden_size={self.language.hidden_size}: "
                "the projector writes into the language model's embedding space"
            )
        return self
