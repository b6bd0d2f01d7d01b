"""Tensors of the shipped models, computed from sizes without Megatron-Core."""

import torch

from kimi_pretrain.config import Config, load_config
from kimi_pretrain.optim.groups import ModelShape
from kimi_pretrain.optim.owners import TensorSize
from moonvit3d.model import VisionEncoder

PRESETS = ("tiny_cpu", "moonlight_16b_a3b", "kimi_k25_1t")


def preset(name: str) -> tuple[Config, ModelShape]:
    config = load_config(name)
    return config, ModelShape.of(config.model)


def dense(config: Config, layers: range) -> list[TensorSize]:
    """Return the tensors on each rank of a stage with these layers, without vocabulary tables."""
    return [
        TensorSize(f"language_model.model.layers.{layer}.{name}.weight", shape, 2)
        for layer in layers
        for name, shape in (_attention(config) | _feed_forward(config, layer)).items()
    ]


def experts(config: Config, layers: range, some: range) -> list[TensorSize]:
    """Return the tensors of a rank with these experts of these layers."""
    language = config.model.language
    width, hidden = language.expert_ffn_size, language.hidden_size
    return [
        TensorSize(f"language_model.model.layers.{layer}.mlp.experts.{expert}.{name}", shape, 2)
        for layer in layers
        for expert in some
        for name, shape in _mlp("", hidden, width, ".weight").items()
        if layer >= language.num_dense_layers
    ]


def encoder(config: Config) -> list[TensorSize]:
    with torch.device("meta"):
        module = VisionEncoder(config.model.vision)
    return [TensorSize(name, tuple(p.shape), 2) for name, p in module.named_parameters()]


def _attention(config: Config) -> dict[str, tuple[int, ...]]:
    language = config.model.language
    hidden, latent = language.hidden_size, language.kv_lora_rank
    queries = language.num_heads * (language.qk_nope_dim + language.qk_rope_dim)
    keys_values = language.num_heads * (language.qk_nope_dim + language.v_dim)
    if language.q_lora_rank is None:
        query = {"self_attn.q_proj": (queries, hidden)}
    else:
        query = {
            "self_attn.q_a_proj": (language.q_lora_rank, hidden),
            "self_attn.q_a_layernorm": (language.q_lora_rank,),
            "self_attn.q_b_proj": (queries, language.q_lora_rank),
        }
    return query | {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.kv_a_proj_with_mqa": (latent + language.qk_rope_dim, hidden),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (keys_values, latent),
        "self_attn.o_proj": (hidden, language.num_heads * language.v_dim),
    }


def _feed_forward(config: Config, layer: int) -> dict[str, tuple[int, ...]]:
    language = config.model.language
    if layer < language.num_dense_layers:
        return _mlp("mlp.", language.hidden_size, language.dense_ffn_size)
    shared = language.num_shared_experts * language.expert_ffn_size
    router = {"mlp.gate": (language.num_experts, language.hidden_size)}
    return router | _mlp("mlp.shared_experts.", language.hidden_size, shared)


def _mlp(prefix: str, hidden: int, width: int, end: str = "") -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj{end}": (width, hidden),
        f"{prefix}up_proj{end}": (width, hidden),
        f"{prefix}down_proj{end}": (hidden, width),
    }
