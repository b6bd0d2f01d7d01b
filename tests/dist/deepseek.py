"""Configuration of the same model in transformers."""

from typing import Any

from kimi_pretrain.weights.model_config import LanguageConfig


def deepseek_v3(language: LanguageConfig, length: int) -> dict[str, Any]:
    """Return the arguments of transformers' `DeepseekV3Config` for rows of `length` tokens."""
    config: dict[str, Any] = dict(
        vocab_size=language.vocab_size, hidden_size=language.hidden_size,
        intermediate_size=language.dense_ffn_size, moe_intermediate_size=language.expert_ffn_size,
        num_hidden_layers=language.num_layers, num_attention_heads=language.num_heads,
        num_key_value_heads=language.num_heads, n_shared_experts=language.num_shared_experts,
        n_routed_experts=language.num_experts, routed_scaling_factor=language.routed_scaling_factor,
        kv_lora_rank=language.kv_lora_rank, q_lora_rank=language.q_lora_rank,
        qk_rope_head_dim=language.qk_rope_dim, qk_nope_head_dim=language.qk_nope_dim,
        v_head_dim=language.v_dim, n_group=1, topk_group=1, num_mtp_layers=0,
        num_experts_per_tok=language.experts_per_token, norm_topk_prob=True,
        first_k_dense_replace=language.num_dense_layers, rms_norm_eps=language.norm_eps,
        rope_theta=language.rope_theta, max_position_embeddings=length, rope_interleave=True,
        attention_bias=False, tie_word_embeddings=False,
    )  # fmt: skip
    if language.yarn:
        yarn = language.yarn
        config["rope_scaling"] = dict(
            rope_type="yarn", factor=yarn.factor, beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow, mscale=yarn.mscale, mscale_all_dim=yarn.mscale_all_dim,
            original_max_position_embeddings=yarn.original_max_position,
            rope_theta=language.rope_theta,
        )  # fmt: skip
    return config
