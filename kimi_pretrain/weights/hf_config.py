"""Writes the `config.json` of a Hugging Face folder for a model, and compares it with one. Pure.

Two kinds are written: `deepseek_v3` (K2 and Moonlight, only the language model) and `kimi_k25`
(language model and vision encoder). The keys are those of Moonshot's files, plus the names that
transformers uses for the sizes of the vision encoder, because its class knows no others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kimi_pretrain.weights.int4 import QUANTIZATION
from kimi_pretrain.weights.model_config import LanguageConfig, ModelConfig
from moonvit3d.config import MoonViTConfig

Kind = Literal["kimi_k25", "deepseek_v3"]

# Maps keys of config.json to ours: sizes that determine shapes, and the number of heads.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_heads",
    "intermediate_size": "dense_ffn_size",
    "moe_intermediate_size": "expert_ffn_size",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_dim",
    "qk_rope_head_dim": "qk_rope_dim",
    "v_head_dim": "v_dim",
}
# Settings that do not show in shapes; a later training stage may change them.
SETTINGS = {
    "num_experts_per_tok": "experts_per_token",
    "routed_scaling_factor": "routed_scaling_factor",
    "rms_norm_eps": "norm_eps",
}
# Fixed values of this architecture.
FIXED: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
# Maps our names to the keys of Moonshot's file and of transformers.
VISION_SIZES = {
    "width": ("vt_hidden_size", "hidden_size"),
    "depth": ("vt_num_hidden_layers", "num_hidden_layers"),
    "heads": ("vt_num_attention_heads", "num_attention_heads"),
    "mlp_width": ("vt_intermediate_size", "intermediate_size"),
    "pos_grid": ("init_pos_emb_height", "pos_emb_height"),
}
YARN = {
    "factor": ("factor", 1.0),
    "original_max_position_embeddings": ("original_max_position", 4096),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),  # the meaning of an absent key
}


@dataclass(frozen=True)
class SpecialIds:
    """Token ids of Kimi's layout: 256 special ids after the `base` byte-pair ranks."""

    base: int

    @property
    def text(self) -> dict[str, int]:
        """Keys of the language model's section."""
        return {
            "bos_token_id": self.base,
            "eos_token_id": self.base + 1,
            "pad_token_id": self.base + 255,
        }

    @property
    def media(self) -> dict[str, int]:
        """Keys of the whole model: Moonshot's names, then those of transformers."""
        pad = self.base + 21
        return {
            "media_placeholder_token_id": pad,
            "image_token_id": pad,
            "video_token_id": self.base + 256,
            "vision_start_token_id": self.base + 18,
            "vision_end_token_id": self.base + 20,
        }


def config_json(
    model: ModelConfig,
    kind: Kind,
    *,
    dtype: str,
    max_positions: int,
    ids: SpecialIds,
    quantized: bool = False,
) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        dtype: dtype of the weights, "bfloat16" or "float32".
        max_positions: longest sequence that the model supports.
        quantized: True if the routed experts are INT4.

    Raises:
        ValueError: the architecture has no key for a setting of the vision encoder.
    """
    text = _text(model.language, dtype, max_positions) | ids.text
    if quantized:
        text["quantization_config"] = QUANTIZATION
    if kind == "deepseek_v3":
        return text
    check_vision(model.vision)
    whole = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "ignore_index": -100,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        **ids.text,
        **ids.media,
        "projection_hidden_size": model.vision.width,
        "projection_layer_norm_eps": model.vision.norm_eps,
        "text_config": text,
        "vision_config": _vision(model),
    }
    return whole | ({"quantization_config": QUANTIZATION} if quantized else {})


def check_vision(vision: MoonViTConfig) -> None:
    """Raise ValueError for a vision encoder that Kimi K2.5's architecture cannot express."""
    wanted = {"norm_eps": 1e-5, "rope_theta": 10000.0, "projector_width": 4 * vision.width}
    for name, value in wanted.items():
        if getattr(vision, name) != value:
            raise ValueError(
                f"model.vision.{name}={getattr(vision, name)}: in Kimi K2.5's architecture it is "
                f"always {value}, so no other program would compute the same; export the language "
                "model alone (deepseek_v3)"
            )


def _text(language: LanguageConfig, dtype: str, max_positions: int) -> dict[str, Any]:
    named = {key: getattr(language, ours) for key, ours in (SIZES | SETTINGS).items()}
    scaling = None
    if language.yarn is not None:
        scaling = {"type": "yarn"}
        scaling |= {key: getattr(language.yarn, ours) for key, (ours, _) in YARN.items()}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": dtype,
        **named,
        **FIXED,
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": language.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": max_positions,
        "attention_dropout": 0.0,
        "initializer_range": language.init_std,
        "aux_loss_alpha": language.aux_loss_coeff,
        "seq_aux": True,
        "use_cache": True,
    }


def _vision(model: ModelConfig) -> dict[str, Any]:
    vision = model.vision
    sizes = {key: getattr(vision, ours) for ours, keys in VISION_SIZES.items() for key in keys}
    return sizes | {
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "pos_emb_type": "divided_fixed",
        "video_attn_type": "spatial_temporal",
        "init_pos_emb_width": vision.pos_grid,
        "pos_emb_width": vision.pos_grid,
        "init_pos_emb_time": 4,
        "pos_emb_time": 4,
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": vision.width,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": vision.norm_eps,
        "text_hidden_size": model.language.hidden_size,
    }


@dataclass(frozen=True)
class Differences:
    """Messages about differences between a config.json and the run's config.

    Attributes:
        sizes: different sizes or another architecture; the weights cannot be used.
        settings: the weights fit, but the model computes something else with them.
    """

    sizes: tuple[str, ...]
    settings: tuple[str, ...]


def differences(found: Mapping[str, Any], model: ModelConfig) -> Differences:
    """Compare a config.json with a model; absent keys are not compared."""
    text: Mapping[str, Any] = found.get("text_config") or found
    sizes = [
        *_unequal(text, SIZES, model.language, "model.language"),
        *_not_fixed(text),
    ]
    sizes += vision_differences(found, model.vision)
    settings = [*_unequal(text, SETTINGS, model.language, "model.language")]
    settings += _rotary(text, model.language)
    return Differences(tuple(sizes), tuple(settings))


def vision_differences(found: Mapping[str, Any], config: MoonViTConfig) -> list[str]:
    """Return messages about encoder sizes that differ from a config.json."""
    vision: Mapping[str, Any] = found.get("vision_config") or {}
    present = {key: ours for ours, keys in VISION_SIZES.items() for key in keys if key in vision}
    return list(_unequal(vision, present, config, "model.vision"))


def _unequal(
    found: Mapping[str, Any], keys: Mapping[str, str], ours: object, section: str
) -> Iterator[str]:
    for key, name in keys.items():
        if key in found and found[key] != getattr(ours, name):
            yield f"{key} is {found[key]!r}, {section}.{name} is {getattr(ours, name)!r}"


def _not_fixed(text: Mapping[str, Any]) -> Iterator[str]:
    for key, value in FIXED.items():
        if key in text and text[key] != value:
            yield f"{key} is {text[key]!r}, this architecture has {value!r}"
    if text.get("n_group") != text.get("topk_group"):
        yield (
            f"n_group is {text.get('n_group')!r} and topk_group {text.get('topk_group')!r}, this "
            "architecture does not limit experts to groups"
        )


def _rotary(text: Mapping[str, Any], language: LanguageConfig) -> Iterator[str]:
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    theta = text.get("rope_theta", scaling.get("rope_theta"))
    if theta is not None and theta != language.rope_theta:
        yield f"rope_theta is {theta!r}, model.language.rope_theta is {language.rope_theta!r}"
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    yarn = None
    if kind == "yarn":
        yarn = {ours: scaling.get(key, absent) for key, (ours, absent) in YARN.items()}
    elif kind != "default":
        yield f"rope_scaling is {kind!r}, this architecture has YaRN or none"
        return
    ours = None if language.yarn is None else language.yarn.model_dump()
    if yarn != ours:
        yield f"rope_scaling is {yarn!r}, model.language.yarn is {ours!r}"
