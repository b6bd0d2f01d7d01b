"""Lists the name and shape of every tensor of a model. Pure: no model is built.

The names are those of Kimi K2.5's checkpoint. K2 and Moonlight (DeepSeek-V3's layout) use the same
names without `language_model.`, and have no vision encoder. `kimi_pretrain.engine.param_names` maps
the engine's parameters to these names.
"""

from collections.abc import Iterator

from kimi_pretrain.weights.model_config import LanguageConfig, ModelConfig
from moonvit3d.layouts import released_shapes

LANGUAGE = "language_model."
VISION = ("vision_tower.", "mm_projector.")
SIGLIP = "siglip."
"""Prefix of the tensors that only `train.siglip` trains; they are not part of the model."""
PARTS = {"vision_tower": VISION[0], "projector": VISION[1], "language_model": LANGUAGE}
"""Name prefixes of the parts that `train.frozen` names."""
BIAS = ".e_score_correction_bias"  # routing bias: updated by a rule, no parameter, always float32

Shapes = dict[str, tuple[int, ...]]


def model_shapes(model: ModelConfig) -> Shapes:
    """Return name -> shape of every tensor of a model, including routing biases."""
    return released_shapes(model.vision) | language_shapes(model.language)


def language_shapes(language: LanguageConfig) -> Shapes:
    """Return name -> shape of the language model's tensors."""
    hidden, table = language.hidden_size, (language.vocab_size, language.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": table}
    for layer in range(language.num_layers):
        for name, shape in _layer(language, dense=layer < language.num_dense_layers):
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": table}
    return {LANGUAGE + name: shape for name, shape in shapes.items()}


def part_of(name: str) -> str:
    """Return a short description of the model part that a tensor belongs to."""
    name = name.removeprefix(LANGUAGE)
    if name.startswith(VISION):
        return name.split(".")[0]
    if name.endswith(BIAS):
        return "routing biases"
    for piece, part in (
        (".self_attn.", "attention"),
        (".mlp.experts.", "routed experts"),
        (".mlp.shared_experts.", "shared experts"),
        (".mlp.gate.", "routers"),
        (".mlp.", "dense layers"),
        ("norm.weight", "norms"),
    ):
        if piece in name:
            return part
    return "embedding and head"


def is_routed_expert(name: str) -> bool:
    """Return True for a matrix of a routed expert."""
    return ".mlp.experts." in name


def _layer(language: LanguageConfig, dense: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = language.hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield from _attention(language)
    yield "post_attention_layernorm.weight", (hidden,)
    if dense:
        yield from _ffn("mlp", hidden, language.dense_ffn_size)
        return
    yield "mlp.gate.weight", (language.num_experts, hidden)
    yield "mlp.gate" + BIAS, (language.num_experts,)
    for expert in range(language.num_experts):
        yield from _ffn(f"mlp.experts.{expert}", hidden, language.expert_ffn_size)
    shared = language.num_shared_experts * language.expert_ffn_size
    yield from _ffn("mlp.shared_experts", hidden, shared)


def _attention(language: LanguageConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, rope = language.hidden_size, language.num_heads, language.qk_rope_dim
    query, latent = heads * (language.qk_nope_dim + rope), language.kv_lora_rank
    if language.q_lora_rank is None:
        yield "self_attn.q_proj.weight", (query, hidden)
    else:
        yield "self_attn.q_a_proj.weight", (language.q_lora_rank, hidden)
        yield "self_attn.q_a_layernorm.weight", (language.q_lora_rank,)
        yield "self_attn.q_b_proj.weight", (query, language.q_lora_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    up = heads * (language.qk_nope_dim + language.v_dim)
    yield "self_attn.kv_b_proj.weight", (up, latent)
    yield "self_attn.o_proj.weight", (hidden, heads * language.v_dim)


def _ffn(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)
